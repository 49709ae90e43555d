// Intents: those whose runs live, those that ended by the rows of the log, and one with all that is known of it.
import { html } from "./html.js";
import { runs } from "./live.js";
import { Act, agentLink, intentLink, Problem, runLink, Steps, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon, supervisor } from "./session.js";
import { line, shown } from "./text.js";

const ENDS = ["intent_dispatched", "intent_failed", "intent_ignored", "budget_exhausted", "intent_resumed"];
const WORDS = { intent_failed: "failed", intent_ignored: "ignored", budget_exhausted: "waits", intent_resumed: "resumed" };
const REASON = "the intent was ended in the web console";
const MOST = 500;

// The end of an intent, by its row; its agent has no name where none was found. Version 1's log then says ok.
function ended(event) {
  const one = event.kind;
  const unmatched = one.type === "intent_dispatched" && one.matched_agent == null;
  return {
    id: one.intent_id,
    at: event.timestamp_ms,
    status: unmatched ? "no agent" : (WORDS[one.type] ?? one.status),
    agent: one.matched_agent ?? String(one.agent_display ?? "").split("@")[0],
    text: one.intent_text || one.message || one.resumed_from || "",
    by: event.issuer.display,
  };
}

function living(run) {
  return { id: run.intent_id, at: run.started_ms, status: run.state, agent: run.agent_id, text: "", by: "", run: run.run_id };
}

// The newest of each intent, and what lives first: an intent that waited ends twice.
function listed(events) {
  const live = runs.value.filter((one) => one.intent_id).map(living);
  const known = new Map([...live, ...events.map(ended)].reverse().map((one) => [one.id, one]));
  return [...known.values()].reverse();
}

const columns = [
  ["Time", (one) => html`<${Time} ms=${one.at} />`],
  ["Intent", (one) => intentLink(one.id)],
  ["Agent", (one) => agentLink(one.agent)],
  ["Status", (one) => (["failed", "waits"].includes(one.status) ? html`<span class="alarm">! ${one.status}</span>` : line(one.status))],
  ["By", (one) => line(one.by)],
  ["Text", (one) => line(one.text)],
];

function Ways({ one }) {
  const kill = async () => `ended: ${(await supervisor("operate", { operation: "kill", run: one.run, tree: true, reason: REASON })).runs.length} runs`;
  const resume = async () => {
    const done = await daemon("resume_intent", { intent_id: one.id });
    return `${done.status}: ${done.text}`;
  };
  return html`${one.run && html`<p>Run ${runLink(one.run)} works on it.
      <${Act} name="end it" about=${`The run of intent ${line(one.id)}, agent ${line(one.agent)}, is killed with every run below it. This cannot be undone. The log has it with the reason: ${REASON}.`} act=${kill} /></p>`}
    ${one.status === "waits" && html`<p>It waits for credits.${" "}
      <${Act} name="start it again" about=${`Intent ${line(one.id)} is submitted again as you: ${line(one.text)}`} act=${resume} /></p>`}`;
}

// The answer is asked for once the intent has ended: before, there is none.
function Answer({ of }) {
  const [found, error] = useAnswer(() => daemon("get_intent_result", { intent_id: of }));
  return html`<h2>Answer</h2><${Problem} error=${error} />
    ${found && html`<p>${line(found.status)}${found.run_id ? html`, run ${runLink(found.run_id)}` : ""}${found.agent_id ? html`, agent ${agentLink(found.agent_id)}` : ""}</p>
      <pre tabindex="0">${shown(found.text)}</pre>
      ${found.sources?.length > 0 && html`<ul>${found.sources.map((one) => html`<li>${line(one, 1000)}</li>`)}</ul>`}`}`;
}

function Intent({ of }) {
  const [log, error] = useAnswer(() => daemon("recent_audit", { limit: MOST, extended: true, intent_id: of }), ["audit"]);
  const rows = [...(log?.events ?? [])];
  const one = listed(rows.filter((event) => ENDS.includes(event.kind.type))).find((each) => each.id === of);
  return html`<${Title}>Intent ${line(of).slice(0, 8)}<//><${Problem} error=${error} />
    ${one && html`<${Table} caption="Now" columns=${columns} rows=${[one]} keyOf=${(each) => each.id} /><${Ways} one=${one} />`}
    ${one && !one.run && !["waits", "ignored"].includes(one.status) && html`<${Answer} key=${one.status} of=${of} />`}
    <h2>Events</h2><${Steps} events=${rows.reverse()} without=${["intent_id"]} of="your rows of the log" />`;
}

function List() {
  const [log, error] = useAnswer(() => daemon("recent_audit", { limit: MOST, types: ENDS }), ["audit"]);
  return html`<${Title}>Intents<//><${Problem} error=${error} />
    <${Table} caption="Live, and the newest that ended" columns=${columns} rows=${listed(log?.events ?? [])} keyOf=${(one) => one.id} />`;
}

export const Intents = ({ of }) => (of ? html`<${Intent} of=${of} />` : html`<${List} />`);

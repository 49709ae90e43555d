// What was refused, and what waits for an answer.
import { useState } from "../vendor/hooks.js";
import { held } from "./live.js";
import { html } from "./html.js";
import { denialColumns } from "./overview.js";
import { Act, agentLink, Problem, runLink, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon, packages, supervisor } from "./session.js";
import { line, shown } from "./text.js";

// The meaning of a denial, and the lines of agent.toml that would allow it.
function Explain({ one }) {
  const [found, set] = useState(null);
  const [error, fail] = useState(null);
  function go() {
    const { agent_id, layer, target, code } = one;
    packages("explain_denial", { agent_id: agent_id ?? "", layer, target, code }).then(set, fail);
  }
  const bounds = Object.entries(found?.why?.bounds ?? {});
  return html`<button type="button" onClick=${go} aria-label=${`explain ${line(one.layer)} ${line(one.target, 80)}`}>explain</button>
    <div role="status"><${Problem} error=${error} />${found && html`
      <p>${line(found.meaning, 1000)}</p>
      ${found.why?.never ? html`<p class="alarm">! never grantable: ${line(found.why.never, 1000)}</p>` : ""}
      ${found.add?.length ? html`<p>To grant it, write in agent.toml and sign again:</p><pre>${found.add.map((text) => line(text, 2000)).join("\n")}</pre>` : ""}
      ${bounds.map(([name, allows]) => html`<p>${line(name)} ${allows ? "allows" : "does not allow"} it</p>`)}
      ${found.note ? html`<p>note: ${line(found.note, 1000)}</p>` : ""}`}</div>`;
}

export function Denials() {
  const [denials, error] = useAnswer(() => daemon("recent_denials", { limit: 500 }), ["audit"]);
  return html`<${Title}>Denials<//><${Problem} error=${error} />
    <${Table} caption="Refused to agents, the newest first" columns=${[...denialColumns, ["Why", (one) => html`<${Explain} one=${one} />`]]} rows=${denials?.denials ?? []}
      keyOf=${(one) => one.event_id} />`;
}

const WORDS = { network: "connect to", tool: "call", inject: "send, with a secret," };
const CALL = / sha256:[0-9a-f]{64}$/;

function Wanted({ one }) {
  const call = CALL.test(one.target);
  return html`${WORDS[one.kind] ?? line(one.kind)} <strong class="mono">${line(one.target.replace(CALL, ""), 600)}</strong>
    ${one.side_effect ? html`<br />side effect: ${line(one.side_effect)}` : ""}
    ${call && html`<pre>${shown(one.arguments)}</pre><span class="soft mono">${line(CALL.exec(one.target)[0])}</span>`}
    ${one.add?.length ? html`<details><summary>lines of agent.toml</summary><pre>${one.add.map((text) => line(text, 600)).join("\n")}</pre></details>` : ""}`;
}

// A page has no key, and so no grant: it says how the operator signs one.
function Sign({ one }) {
  const command = (how) => `covenant approvals grant ${line(one.id).slice(0, 8)} ${how}`;
  const ways = [["once", "--once"], ["while the run lives", "--run"], ["for a time", "--until 10m"]];
  if (CALL.test(one.target)) ways.push(["with any arguments", "--run --any-arguments"]);
  return html`<details><summary>grant ${line(one.id).slice(0, 8)}</summary><p>A grant is a lease that your key signs. In a terminal:</p>
    <dl>${ways.map(([name, how]) => html`<dt>${name}</dt><dd><code>${command(how)}</code></dd>`)}</dl></details>`;
}

const deny = (one) => async () => {
  const done = await supervisor("approvals", { verb: "deny", request: one.id });
  return `denied ${line(done.denied?.target ?? one.target, 200)}`;
};
const heldColumns = [
  ["Until", (one) => html`<${Time} ms=${one.ends_ms} />`],
  ["Run", (one) => html`${agentLink(one.agent_id)} ${runLink(one.run_id)}`],
  ["Wants to", (one) => html`<${Wanted} one=${one} />`],
  ["Answer", (one) => html`<${Sign} one=${one} /> <${Act} name=${`deny ${line(one.id).slice(0, 8)}`} act=${deny(one)}
    about=${`Deny run ${line(one.run_id)} of ${line(one.agent_id)}: ${line(one.target, 600)}. It is denied for a minute without a question.`} />`],
];

export function Approvals() {
  const [approvals, error, again] = useAnswer(() => daemon("list_approvals"), ["audit"]);
  const answer = (one, choice) => async () => {
    const done = await daemon("resolve_approval", { approval_id: one.id, choice });
    again();
    return `answered with ${done.choice}`;
  };
  const columns = [
    ["Since", (one) => html`<${Time} ms=${one.requested_at} />`],
    ["Agent", (one) => agentLink(one.agent_id)],
    ["What", (one) => html`${line(one.description)}<pre>${shown(one.command)}</pre>`],
    ["Answer", (one) => one.choices.map((choice) => html`<${Act} key=${choice} name=${line(choice, 40)}
      about=${`Answer run ${line(one.run_id)} of ${line(one.agent_id)} with ${line(choice, 40)}: ${line(one.command || one.description)}. The log has it with your name.`}
      act=${answer(one, choice)} />`)],
  ];
  return html`<${Title}>Approvals<//><${Problem} error=${error} />
    <${Table} caption="Held for an operator" columns=${heldColumns} rows=${held.value} keyOf=${(one) => one.id} />
    <${Table} caption="Waiting for an answer" columns=${columns} rows=${approvals?.approvals ?? []} keyOf=${(one) => one.id} />`;
}

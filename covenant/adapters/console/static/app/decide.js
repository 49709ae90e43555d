// What was refused, and what waits for an answer.
import { useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { denialColumns } from "./overview.js";
import { Act, agentLink, Problem, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon, packages } from "./session.js";
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
    <${Table} caption="Waiting for an answer" columns=${columns} rows=${approvals?.approvals ?? []} keyOf=${(one) => one.id} />`;
}

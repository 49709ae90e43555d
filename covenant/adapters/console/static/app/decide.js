// What was refused, and what waits for an answer.
import { html } from "./html.js";
import { denialColumns } from "./overview.js";
import { Act, agentLink, Problem, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon } from "./session.js";
import { line, shown } from "./text.js";

export function Denials() {
  const [denials, error] = useAnswer(() => daemon("recent_denials", { limit: 500 }), ["audit"]);
  return html`<${Title}>Denials<//><${Problem} error=${error} />
    <${Table} caption="Refused to agents, the newest first" columns=${denialColumns} rows=${denials?.denials ?? []}
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

// The first page: what lives, what was refused, what waits for an answer.
import { html } from "./html.js";
import { held, runs, runsError } from "./live.js";
import { agentLink, Problem, runLink, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon } from "./session.js";
import { age, line, size } from "./text.js";

export const runColumns = [
  ["Run", (one) => html`<span class=${`depth-${Math.min(4, one.depth)}`}>${runLink(one.run_id)}</span>`],
  ["Agent", (one) => agentLink(one.agent_id)],
  ["State", (one) => line(one.state)],
  ["Age", (one) => age(Math.max(0, Date.now() - one.started_ms)), "right"],
  ["CPU", (one) => (one.cpu_ms === null ? "-" : `${(one.cpu_ms / 1000).toFixed(1)} s`), "right"],
  ["Memory", (one) => size(one.memory_bytes), "right"],
  ["Tasks", (one) => one.processes ?? "-", "right"],
  ["Denied", (one) => (one.denied ? html`<span class="alarm">! ${one.denied}</span>` : "0"), "right"],
];

export const denialColumns = [
  ["Time", (one) => html`<${Time} ms=${one.timestamp_ms} />`],
  ["Agent", (one) => agentLink(one.agent_id)],
  ["Run", (one) => runLink(one.run_id)],
  ["Layer", (one) => line(one.layer)],
  ["Target", (one) => html`<span class="mono">${line(one.target)}</span>`],
  ["Code", (one) => line(one.code)],
  ["Times", (one) => one.count, "right"],
];

export const agentColumns = [
  ["Agent", (one) => (one.id ? agentLink(one.id) : html`<span class="mono">${line(one.directory)}</span>`)],
  ["What it does", (one) => line(one.description ?? "-")],
  ["Version", (one) => line(one.version ?? "-")],
  ["Runtime", (one) => line(one.runtime ?? "-")],
  ["State", (one) => (one.routable ? "routable" : html`<span class="alarm">! ${line(one.error ?? "broken")}</span>`)],
  ["Live runs", (one) => runs.value.filter((run) => run.agent_id === one.id).length, "right"],
];

function Tile({ name, children }) {
  return html`<div><dt>${name}</dt><dd>${children}</dd></div>`;
}

export function Overview() {
  const [agents, agentsError] = useAnswer(() => daemon("list_agents"), ["audit"]);
  const [denials, denialsError] = useAnswer(() => daemon("recent_denials", { limit: 200 }), ["audit"]);
  const [approvals] = useAnswer(() => daemon("list_approvals"), ["audit"]);
  const listed = agents?.agents ?? [];
  const refused = denials?.denials ?? [];
  const waiting = [...held.value, ...(approvals?.approvals ?? [])];
  return html`<${Title}>Overview<//>
    <${Problem} error=${runsError.value} /><${Problem} error=${agentsError} /><${Problem} error=${denialsError} />
    <dl class="tiles">
      <${Tile} name="Live runs">${runs.value.length}<//>
      <${Tile} name="Agents">${listed.length}<small>${listed.filter((one) => !one.routable).length} broken</small><//>
      <${Tile} name="Newest denials">${refused.length}<//>
      <${Tile} name="Approvals waiting">${waiting.length ? html`<a href="#/approvals">! ${waiting.length}</a>` : 0}<//>
    </dl>
    <${Table} caption="Live runs" columns=${runColumns} rows=${runs.value} keyOf=${(one) => one.run_id} />
    <${Table} caption="Agents" columns=${agentColumns} rows=${listed} keyOf=${(one) => one.directory} />
    <${Table} caption="Newest denials" columns=${denialColumns} rows=${refused.slice(0, 10)}
      keyOf=${(one) => one.event_id} />`;
}

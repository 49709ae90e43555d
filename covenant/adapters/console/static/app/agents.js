// Agents: what each may do, beside what it tried.
import { html } from "./html.js";
import { runs } from "./live.js";
import { agentColumns, denialColumns, runColumns } from "./overview.js";
import { Problem, Table, Title, useAnswer } from "./parts.js";
import { daemon } from "./session.js";
import { line, when } from "./text.js";

const listAgents = () => daemon("list_agents");

function about(one) {
  const rows = [
    ["Version", one.version],
    ["Runtime", one.runtime],
    ["Capabilities it requires", (one.required ?? []).join(", ")],
    ["Budget", one.budget_credits_per_hour ? `${one.budget_credits_per_hour} credits an hour` : "none"],
    ["Tools", (one.tools_allowed ?? []).join(", ")],
    ["Signature", one.signature_error ?? one.signature],
    ["Signature ends", one.expires_at ? when(one.expires_at) : ""],
    ["Error", one.error],
  ];
  return rows.filter(([, value]) => value);
}

function Agent({ of }) {
  const [agents, error] = useAnswer(listAgents, ["audit"]);
  const [denials, denialsError] = useAnswer(() => daemon("recent_denials", { limit: 1000 }), ["audit"]);
  const one = agents?.agents.find((each) => each.id === of);
  const tried = (denials?.denials ?? []).filter((each) => each.agent_id === of);
  const columns = denialColumns.filter(([head]) => head !== "Agent");
  return html`<${Title}>Agent ${line(of)}<//><${Problem} error=${error} /><${Problem} error=${denialsError} />
    ${agents && !one && html`<p class="soft">No package of this home has this id.</p>`}
    <${Table} caption="Live runs" columns=${runColumns} rows=${runs.value.filter((run) => run.agent_id === of)}
      keyOf=${(run) => run.run_id} />
    <div class="two">
      <section aria-label="What it may do"><h2>What it may do</h2>
        <table role="table"><caption>By its manifest</caption><tbody role="rowgroup">${about(one ?? {}).map(
          ([name, value]) => html`<tr role="row"><th role="rowheader" scope="row">${name}</th><td role="cell">${line(value, 2000)}</td></tr>`,
        )}</tbody></table>
      </section>
      <section aria-label="What it tried"><h2>What it tried</h2>
        <${Table} caption="Denials" columns=${columns} rows=${tried} keyOf=${(each) => each.event_id} />
      </section>
    </div>`;
}

export function Agents({ of }) {
  const [agents, error] = useAnswer(listAgents, ["audit"]);
  if (of) return html`<${Agent} of=${of} />`;
  return html`<${Title}>Agents<//><${Problem} error=${error} />
    <${Table} caption="Packages of this home" columns=${agentColumns} rows=${agents?.agents ?? []}
      keyOf=${(one) => one.directory} />`;
}

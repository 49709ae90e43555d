// Sessions: live runs with a terminal, and one of them in this page.
import { html } from "./html.js";
import { runs } from "./live.js";
import { agentLink, Problem, sessionLink, runLink, Table, Title, useAnswer } from "./parts.js";
import { supervisor } from "./session.js";
import { SessionTerminal } from "./terminal.js";
import { age, line } from "./text.js";

const columns = [
  ["Session", (one) => sessionLink(one.run_id)],
  ["Agent", (one) => agentLink(one.agent_id)],
  ["State", (one) => line(one.state)],
  ["Age", (one) => age(Math.max(0, Date.now() - one.started_ms)), "right"],
  ["Started by", (one) => line(one.issuer)],
];

function List() {
  const [found, error] = useAnswer(() => supervisor("ps"), [], [runs.value.map((one) => one.run_id + one.state).join()]);
  const rows = (found?.runs ?? []).filter((one) => one.contract === "terminal");
  return html`<${Title}>Sessions<//><${Problem} error=${error} />
    <${Table} caption="Live runs with a terminal" columns=${columns} rows=${rows} keyOf=${(one) => one.run_id} />
    <p class="soft">A session that can be attached is started with covenant run PACKAGE --detach, by the daemon's user.</p>`;
}

function Session({ of }) {
  return html`<${Title}>Session ${line(of).slice(0, 8)}<//>
    <p>Its run is ${runLink(of)}. One terminal at a time is attached; what you type reaches the agent as you.</p>
    <${SessionTerminal} run=${of} />`;
}

export const Sessions = ({ of }) => (of ? html`<${Session} key=${of} of=${of} />` : html`<${List} />`);

// Agents: what each may do, beside what it tried.
import { useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { runs } from "./live.js";
import { agentColumns, denialColumns, runColumns } from "./overview.js";
import { Problem, Table, Title, useAnswer } from "./parts.js";
import { daemon, packages } from "./session.js";
import { line, when } from "./text.js";

const listAgents = () => daemon("list_agents");

function about(one) {
  const rows = [
    ["What it does", one.description],
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

const CAUSES = [["manifest", "Granted by its manifest"], ["default", "By default"], ["built-in", "Built in"]];
const ruleColumns = [
  ["Layer", (one) => line(one.artefact)],
  ["Rule", (one) => html`${line(one.says, 600)} <span class="soft mono">${line(one.rule, 4000)}</span>`],
  ["Cause", (one) => html`${line(one.key)} <span class="mono">${line(one.where || one.reason)}</span>${one.parent ? html` (parent: ${line(one.parent)})` : ""}`],
];

// The calls of a filter that have one cause, as one row.
function gathered(rules) {
  const rows = new Map();
  for (const one of rules) {
    const call = one.artefact === "seccomp.bpf";
    const key = call ? [one.artefact, one.says.replace(one.rule, "").trim(), one.key, one.where].join("|") : one.artefact + one.rule;
    const known = rows.get(key);
    if (known) known.rule += `, ${one.rule}`;
    else rows.set(key, { ...one, says: call ? one.says.replace(one.rule, "").trim() : one.says });
  }
  const last = (one) => one.artefact === "seccomp.bpf";
  return [...rows.values()].sort((a, b) => last(a) - last(b));
}

// The rules of every kernel layer, with the line of the manifest that caused each.
function Rules({ found, error }) {
  const rules = found?.rules ?? [];
  return html`<${Problem} error=${error} />
    ${!found && !error && html`<p aria-busy="true" class="soft">It is being compiled.</p>`}
    ${(found?.refusals ?? []).map((one) => html`<${Problem} error=${one} />`)}
    ${found && html`<p class="soft">policy <span class="mono">${line(found.policy_digest)}</span></p>`}
    ${CAUSES.map(([kind, caption]) => {
      const rows = gathered(rules.filter((one) => one.kind === kind));
      return rows.length > 0 && html`<details open=${kind === "manifest"}><summary>${caption}: ${rows.length} rules</summary>
        <${Table} caption=${caption} columns=${ruleColumns} rows=${rows} keyOf=${(one) => one.artefact + one.rule} /></details>`;
    })}
  `;
}

// Another manifest, before it is written and signed: what it would allow more or less, in the kernel's own terms.
function Compare({ of, manifest }) {
  const [found, set] = useState(null);
  const [error, fail] = useState(null);
  async function submit(event) {
    event.preventDefault();
    fail(null);
    try {
      set(await packages("compare_manifest", { agent_id: of, manifest: new FormData(event.target).get("manifest") }));
    } catch (refused) {
      set(null);
      fail(refused);
    }
  }
  return html`<h2>Try another manifest</h2>
    <form onSubmit=${submit}>
      <label class="soft" for="manifest">agent.toml, compared with the package as it is; nothing is written</label>
      <textarea id="manifest" name="manifest" rows="14" spellcheck=${false} class="mono">${manifest}</textarea>
      <button class="main">compare</button>
    </form>
    <div role="status"><${Problem} error=${error} />
      ${found && html`<p>${found.widens ? html`<strong class="alarm">! it allows more</strong>` : html`<strong class="good">it allows no more</strong>`}: ${line(found.summary)}</p>
        ${found.refusals.map((one) => html`<${Problem} error=${one} />`)}
        ${found.rows.map((row) => html`<h3>${line(row.domain)}: ${line(row.risk)}</h3><pre>${[
          ...row.added.map((one) => `+ ${line(one)}`),
          ...row.removed.map((one) => `- ${line(one)}`),
        ].join("\n")}</pre>`)}`}
    </div>`;
}

function Agent({ of }) {
  const [agents, error] = useAnswer(listAgents, ["audit"]);
  const [denials, denialsError] = useAnswer(() => daemon("recent_denials", { limit: 1000 }), ["audit"]);
  const [compiled, refused] = useAnswer(() => packages("agent_rules", { agent_id: of }));
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
        <${Rules} found=${compiled} error=${refused} />
      </section>
      <section aria-label="What it tried"><h2>What it tried</h2>
        <${Table} caption="Denials" columns=${columns} rows=${tried} keyOf=${(each) => each.event_id} />
      </section>
    </div>
    ${compiled && html`<${Compare} of=${of} manifest=${compiled.manifest} />`}`;
}

export function Agents({ of }) {
  const [agents, error] = useAnswer(listAgents, ["audit"]);
  if (of) return html`<${Agent} of=${of} />`;
  return html`<${Title}>Agents<//><${Problem} error=${error} />
    <${Table} caption="Packages of this home" columns=${agentColumns} rows=${agents?.agents ?? []}
      keyOf=${(one) => one.directory} />`;
}

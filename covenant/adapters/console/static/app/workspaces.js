// Workspaces: what runs changed in directories; their changes are applied, or thrown away.
import { useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { Act, agentLink, Problem, runLink, Table, Title, useAnswer, workspaceLink } from "./parts.js";
import { supervisor } from "./session.js";
import { age, line, shown, size } from "./text.js";

const SIGNS = { add: "+ new", modify: "~ changed", delete: "- removed", mode: "m mode" };
const ask = (verb, fields = {}) => supervisor("workspace", { verb, ...fields });

const columns = [
  ["Run", (one) => workspaceLink(one.run_id)],
  ["Agent", (one) => agentLink(one.agent_id)],
  ["Changes", (one) => one.changes, "right"],
  ["Size", (one) => size(one.bytes), "right"],
  ["Age", (one) => age(Math.max(0, Date.now() - one.started_ms)), "right"],
  ["Apply by", (one) => line(one.apply)],
  ["Directory", (one) => html`<span class="mono">${line(one.directory)}</span>`],
];

function text(base64) {
  const raw = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
  return raw.includes(0) ? `(${raw.length} bytes that are no text)` : new TextDecoder().decode(raw);
}

// The lines of two texts that differ, between what they begin and end with alike; no smaller difference is looked for.
export function changed(before, after) {
  const [old, now] = [before, after].map((one) => (one ? one.replace(/\n$/, "").split("\n") : []));
  let [first, last] = [0, 0];
  while (first < Math.min(old.length, now.length) && old[first] === now[first]) first += 1;
  while (last < Math.min(old.length, now.length) - first && old.at(-1 - last) === now.at(-1 - last)) last += 1;
  const signed = (sign, all) => all.slice(first, all.length - last).map((one) => `${sign} ${one}`);
  const head = first ? [`  (${first} lines as before)`] : [];
  return [...head, ...signed("-", old), ...signed("+", now), ...(last ? [`  (${last} lines as before)`] : [])].join("\n");
}

function Content({ run, path }) {
  const [found, set] = useState(null);
  const [error, fail] = useState(null);
  const go = () => ask("texts", { run, paths: [path] }).then((answer) => set(answer.texts[0]), fail);
  return html`<button type="button" onClick=${go} aria-label=${`show ${line(path, 80)}`}>show</button>
    <div role="status"><${Problem} error=${error} />${found && html`<pre>${shown(changed(text(found.old), text(found.new)) || "(no line differs)")}</pre>`}</div>`;
}

const verdict = (one) => one.refused || one.conflict;
const changeColumns = (run) => [
  ["Change", (one) => SIGNS[one.action] ?? line(one.action)],
  ["Path", (one) => html`<span class="mono">${line(one.path, 1000)}${one.target ? ` -> ${line(one.target)}` : ""}</span>`],
  ["Size", (one) => (one.kind === "file" ? size(one.size) : line(one.kind)), "right"],
  ["Apply", (one) => (verdict(one) ? html`<span class="alarm">! ${one.refused ? "refused" : "conflict"}</span>: ${line(verdict(one), 1000)}` : "yes")],
  ["Content", (one) => one.kind === "file" && html`<${Content} run=${run} path=${one.path} />`],
];

function Workspace({ of }) {
  const [found, error, again] = useAnswer(() => ask("diff", { run: of }));
  // The digest holds the act to the changes that were shown.
  const apply = async () => {
    const done = await ask("apply", { run: of, digest: found.digest });
    return `applied ${done.count} changes; ${done.left.length + done.more} are left`;
  };
  const discard = async () => {
    await ask("discard", { run: of });
    return "thrown away; the directory is as it was";
  };
  const about = found && `${line(found.directory, 1000)}`;
  return html`<${Title}>Workspace of run ${line(of).slice(0, 8)}<//><${Problem} error=${error} />
    ${found && html`<p>Run ${runLink(found.run_id)} of agent ${agentLink(found.agent_id)} changed <span class="mono">${about}</span>.
        Digest <span class="mono">${line(found.digest)}</span></p>
      ${found.apply === "operator" && html`<p class="warn">! An apply needs an operator's signature: covenant workspace approve ${line(of).slice(0, 8)} --digest ${line(found.digest)} --key NAME --out FILE</p>`}
      <p>${found.applicable > 0 && found.apply !== "operator" && html`<${Act} name="apply" act=${apply} done=${again}
        about=${`${found.applicable} changes are written to ${about}, as they are shown here, with the rights of its owner.`} />`}
      <${Act} name="throw away" act=${discard}
        about=${`All changes of run ${line(of)} are thrown away; ${about} stays as it is. This cannot be undone.`} /></p>
      <${Table} caption="Changes" columns=${changeColumns(of)} rows=${found.changes} keyOf=${(one) => one.path} />
      ${found.more > 0 && html`<p>and ${found.more} more: covenant workspace diff ${line(of).slice(0, 8)}</p>`}`}`;
}

function List() {
  const [found, error, again] = useAnswer(() => ask("list"));
  return html`<${Title}>Workspaces<//><${Problem} error=${error} />
    ${(found?.damaged ?? []).map((name) => html`<p class="note">! damaged: ${line(name)}; see covenant workspace list</p>`)}
    <${Table} caption="Changes that wait" columns=${columns} rows=${found?.workspaces ?? []} keyOf=${(one) => one.run_id} />
    <p><button type="button" onClick=${again}>look again</button></p>`;
}

export const Workspaces = ({ of }) => (of ? html`<${Workspace} of=${of} />` : html`<${List} />`);

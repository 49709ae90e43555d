// The audit log, and proofs that a row is in it: this browser computes every hash of a proof itself (RFC 6962, RFC 9162).
import { useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { Problem, Table, Time, Title, useAnswer } from "./parts.js";
import { fields, isBad, told } from "./rows.js";
import { daemon } from "./session.js";
import { line } from "./text.js";

const bytesOf = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
const hexOf = (bytes) => Array.from(bytes, (one) => one.toString(16).padStart(2, "0")).join("");

async function hash(prefix, ...parts) {
  const all = [prefix, ...parts.flatMap((part) => [...part])];
  return new Uint8Array(await crypto.subtle.digest("SHA-256", Uint8Array.from(all)));
}

// The line of the log that a row was made from: JSON without spaces, in ASCII.
export function lineOf(event) {
  const { id, timestamp_ms, issuer, kind } = event;
  const text = JSON.stringify({ id, timestamp_ms, issuer: { display: issuer.display, pubkey: issuer.pubkey }, kind });
  return text.replace(/[^\x20-\x7e]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// The root that a leaf's path leads to (RFC 9162, 2.1.3.2); null if the path does not fit the tree.
export async function rootOf(leaf, index, size, path) {
  if (index >= size) return null;
  let [at, last, root] = [index, size - 1, leaf];
  for (const beside of path) {
    if (last === 0) return null;
    if (at % 2 === 1 || at === last) {
      root = await hash(1, beside, root);
      while (at % 2 === 0 && at !== 0) [at, last] = [Math.floor(at / 2), Math.floor(last / 2)];
    } else {
      root = await hash(1, root, beside);
    }
    [at, last] = [Math.floor(at / 2), Math.floor(last / 2)];
  }
  return last === 0 ? root : null;
}

// The root in a checkpoint (C2SP signed note): its origin, its size, its root in base64.
function signed(checkpoint) {
  const [, size, root] = (checkpoint ?? "").split("\n");
  return root ? [Number(size), hexOf(Uint8Array.from(atob(root), (one) => one.charCodeAt(0)))] : [0, ""];
}

export async function check(event) {
  const { proof } = await daemon("prove_audit_inclusion", { event_id: event.id, extended: true });
  if (!proof) return [["!", "the log gives no proof that this row is in it"]];
  const leaf = await hash(0, new TextEncoder().encode(lineOf(event)));
  const path = proof.path_hex.map(bytesOf);
  const root = await rootOf(leaf, proof.leaf_index, proof.tree_size, path);
  const [size, known] = signed(proof.checkpoint);
  const says = (good, text) => [good ? "ok" : "!", text];
  return [
    says(hexOf(leaf) === proof.leaf_hash_hex, "the row, hashed here, is the leaf"),
    says(root !== null && hexOf(root) === proof.root_hash_hex, `${path.length} hashes lead from row ${proof.leaf_index} of ${proof.tree_size} to the root`),
    says(size === proof.tree_size && known === proof.root_hash_hex, "the checkpoint of that size has this root"),
    ["", `root ${proof.root_hash_hex}`],
  ];
}

function Proof({ event }) {
  const [found, set] = useState([]);
  async function go() {
    set(await check(event).catch((error) => [["!", error.message]]));
  }
  return html`<button type="button" onClick=${go} aria-label=${`check the proof of row ${line(event.id)}`}>check</button>
    <span role="status">${found.map(([sign, text]) => html`<div class=${sign === "!" ? "alarm" : sign === "ok" ? "good" : "mono"}>
      ${sign} ${line(text)}</div>`)}</span>`;
}

export function Audit() {
  const [limit, more] = useState(100);
  const [word, find] = useState("");
  const [log, error] = useAnswer(() => daemon("recent_audit", { limit, extended: true }), ["audit"], [limit]);
  const [chain, chainError, verify] = useAnswer(() => daemon("verify_audit_integrity"));
  const report = chain?.report;
  const has = (event) => !word || JSON.stringify(event).toLowerCase().includes(word.toLowerCase());
  const columns = [
    ["Time", (event) => html`<${Time} ms=${event.timestamp_ms} />`],
    ["Kind", (event) => html`<span class=${isBad(fields(event)) ? "alarm" : ""}>${isBad(fields(event)) ? "! " : ""}${line(fields(event).type)}</span>`],
    ["By", (event) => line(event.issuer.display)],
    ["What", (event) => html`<span class="mono">${line(told(fields(event)), 400)}</span>`],
    ["In the log", (event) => html`<${Proof} event=${event} />`],
  ];
  return html`<${Title}>Audit<//><${Problem} error=${error} /><${Problem} error=${chainError} />
    <p class="panel">${!report ? "The chain is being checked." : report.valid
      ? html`<span class="good">ok</span> the chain holds: ${report.events} rows, root <span class="mono">${line(report.root_hash_hex)}</span>`
      : html`<span class="alarm">! the chain does not hold</span>: ${report.failures.length} failures; see covenant audit verify`}
      ${" "}<button type="button" onClick=${verify}>verify again</button></p>
    <form class="find" onSubmit=${(event) => event.preventDefault()}>
      <label>Rows with this word <input value=${word} onInput=${(event) => find(event.target.value)} /></label>
      <button type="button" onClick=${() => more(limit * 4)}>more rows</button>
    </form>
    <${Table} caption="The newest rows" columns=${columns} rows=${(log?.events ?? []).filter(has)} keyOf=${(event) => event.id} />`;
}

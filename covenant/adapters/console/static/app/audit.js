// The audit log, and proofs that a row is in it: this browser computes every hash of a proof itself (RFC 6962, RFC 9162),
// and checks the signature of the checkpoint (C2SP signed note, RFC 8032).
import { useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { Problem, Table, Time, Title, useAnswer } from "./parts.js";
import { fields, isBad, told } from "./rows.js";
import { daemon, logKey } from "./session.js";
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

const decoded = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));

// The root in a checkpoint: its origin, its size, its root in base64.
function signed(checkpoint) {
  const [, size, root] = (checkpoint ?? "").split("\n");
  return root ? [Number(size), hexOf(decoded(root))] : [0, ""];
}

// A key of notes, `name+id+key`: its id is a digest of the rest, and the key's first byte is 1, Ed25519.
async function keyOf(vkey) {
  const [, name, id, encoded] = /^([^+\s]+)\+([0-9a-f]{8})\+([A-Za-z0-9+/]{44})$/.exec(vkey.trim()) ?? [];
  const material = name ? decoded(encoded) : [];
  if (material.length !== 33 || material[0] !== 1) throw new Error("the key is none of a log: name+id+key, as in checkpoint.vkey");
  const digest = await crypto.subtle.digest("SHA-256", Uint8Array.from([...new TextEncoder().encode(`${name}\n`), ...material]));
  if (hexOf(new Uint8Array(digest).slice(0, 4)) !== id) throw new Error("the key's id is that of another key");
  return { name, id, key: await crypto.subtle.importKey("raw", material.slice(1), "Ed25519", false, ["verify"]) };
}

// Whether a checkpoint is signed with this key: it has a signature of it, and each of those holds.
export async function isSigned(checkpoint, vkey) {
  const { name, id, key } = await keyOf(vkey);
  const gap = checkpoint.lastIndexOf("\n\n");
  const text = new TextEncoder().encode(checkpoint.slice(0, gap + 1));
  const own = checkpoint.slice(gap + 2).split("\n").filter((one) => one.startsWith(`\u2014 ${name} `))
    .map((one) => decoded(one.split(" ")[2])).filter((one) => hexOf(one.slice(0, 4)) === id);
  const held = await Promise.all(own.map((one) => crypto.subtle.verify("Ed25519", key, one.slice(4), text)));
  return gap > 0 && held.length > 0 && held.every(Boolean);
}

async function signature(checkpoint, vkey) {
  try {
    const name = vkey.trim().split("+").slice(0, 2).join("+");
    if (await isSigned(checkpoint ?? "", vkey)) return ["ok", `the checkpoint is signed with the key ${name}`];
    return ["!", `the checkpoint is not signed with the key ${name}`];
  } catch (error) {
    const cannot = error.name === "NotSupportedError" ? "this browser cannot check Ed25519 signatures; see covenant audit prove" : error.message;
    return ["!", `the checkpoint's signature is not checked: ${cannot}`];
  }
}

export async function check(event, vkey = logKey()) {
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
    await signature(proof.checkpoint, vkey),
    ["", `root ${proof.root_hash_hex}`],
  ];
}

function Proof({ event, vkey }) {
  const [found, set] = useState([]);
  async function go() {
    set(await check(event, vkey).catch((error) => [["!", error.message]]));
  }
  return html`<button type="button" onClick=${go} aria-label=${`check the proof of row ${line(event.id)}`}>check</button>
    <span role="status">${found.map(([sign, text]) => html`<div class=${sign === "!" ? "alarm" : sign === "ok" ? "good" : "mono"}>
      ${sign} ${line(text)}</div>`)}</span>`;
}

export function Audit() {
  const [limit, more] = useState(100);
  const [word, find] = useState("");
  const [vkey, trust] = useState(logKey());
  const [log, error] = useAnswer(() => daemon("recent_audit", { limit, extended: true }), ["audit"], [limit]);
  const [chain, chainError, verify] = useAnswer(() => daemon("verify_audit_integrity"));
  const report = chain?.report;
  const has = (event) => !word || JSON.stringify(event).toLowerCase().includes(word.toLowerCase());
  const columns = [
    ["Time", (event) => html`<${Time} ms=${event.timestamp_ms} />`],
    ["Kind", (event) => html`<span class=${isBad(fields(event)) ? "word alarm" : "word"}>${isBad(fields(event)) ? "! " : ""}${line(fields(event).type)}</span>`],
    ["By", (event) => line(event.issuer.display)],
    ["What", (event) => html`<span class="mono">${line(told(fields(event)), 400)}</span>`],
    ["In the log", (event) => html`<${Proof} event=${event} vkey=${vkey} />`],
  ];
  return html`<${Title}>Audit<//><${Problem} error=${error} /><${Problem} error=${chainError} />
    <p class="panel">${!report ? "The chain is being checked." : report.valid
      ? html`<span class="good">ok</span> the chain holds: ${report.events} rows, root <span class="mono">${line(report.root_hash_hex)}</span>`
      : html`<span class="alarm">! the chain does not hold</span>: ${report.failures.length} failures; see covenant audit verify`}
      ${" "}<button type="button" onClick=${verify}>verify again</button></p>
    <form class="find" onSubmit=${(event) => event.preventDefault()}>
      <label>Rows with this word <input value=${word} onInput=${(event) => find(event.target.value)} /></label>
      <label>Key of the log, as in checkpoint.vkey <input class="mono" size="40" value=${vkey} onInput=${(event) => trust(event.target.value)} /></label>
      <button type="button" onClick=${() => more(limit * 4)}>more rows</button>
    </form>
    <${Table} caption="The newest rows" columns=${columns} rows=${(log?.events ?? []).filter(has)} keyOf=${(event) => event.id} />`;
}

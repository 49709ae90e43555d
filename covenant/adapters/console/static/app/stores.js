// What the daemon keeps: memory, grants and peers.
import { useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { Act, Problem, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon } from "./session.js";
import { line, shown, when } from "./text.js";

export function Memory() {
  const [asked, set] = useState({ query: "", tier: "" });
  const ask = () => {
    const tier = asked.tier ? { tier: asked.tier } : {};
    return asked.query ? daemon("search_memory", { query: asked.query, limit: 100, ...tier }) : daemon("recent_memory", { limit: 100, ...tier });
  };
  const [found, error] = useAnswer(ask, ["memory"], [asked.query, asked.tier]);
  const columns = [
    ["Time", (one) => html`<${Time} ms=${one.created_at} />`],
    ["Tier", (one) => line(one.tier)],
    ["Owner", (one) => line(one.owner.display)],
    ["Text", (one) => shown(one.text, 2000)],
  ];
  function submit(event) {
    event.preventDefault();
    const given = new FormData(event.target);
    set({ query: given.get("query"), tier: given.get("tier") });
  }
  return html`<${Title}>Memory<//><${Problem} error=${error} />
    <form class="find" role="search" onSubmit=${submit}>
      <label>By meaning and words <input name="query" /></label>
      <label>Tier <select name="tier">${["", "working", "episodic", "longterm"].map(
        (tier) => html`<option value=${tier}>${tier || "all"}</option>`,
      )}</select></label>
      <button class="main">search</button>
    </form>
    <${Table} caption=${asked.query ? "What fits best" : "The newest records"} columns=${columns} rows=${found?.records ?? []}
      keyOf=${(one) => one.id} />`;
}

function state(one, use) {
  if (!use) return "-";
  if (use.revoked) return "revoked";
  const word = { true: "live", false: "over" }[use.effective] ?? use.effective;
  return word === "live" ? "holds" : line(word);
}

export function Capabilities() {
  const [grants, error] = useAnswer(() => daemon("recent_capabilities", { limit: 500 }), ["audit"]);
  const [uses, usesError] = useAnswer(() => daemon("capability_usage", { limit: 500 }), ["audit"]);
  const [peers, peersError] = useAnswer(() => daemon("list_peers", { limit: 500 }), ["audit"]);
  const bySignature = new Map((uses?.grants ?? []).map((one) => [one.signature_b58, one]));
  const revoke = (one) => async () => {
    const done = await daemon("revoke_capability", { signature_b58: one.signature });
    return done.removed ? "revoked" : "! there is no such grant that holds";
  };
  const revokePeer = (one) => async () => {
    const { outcome } = await daemon("revoke_peer", { token_prefix: one.token_prefix });
    return outcome.type === "revoked" ? "revoked" : `! ${outcome.type}; see covenant peers revoke`;
  };
  const used = (one) => bySignature.get(one.signature)?.budget;
  const grantColumns = [
    ["Action", (one) => line(one.capability.action)],
    ["Subject", (one) => line(one.capability.subject.display)],
    ["Scope", (one) => html`<span class="mono">${line(one.capability.scope)}</span>`],
    ["Granted by", (one) => line(one.capability.granted_by.display)],
    ["State", (one) => state(one, bySignature.get(one.signature))],
    ["Used", (one) => (used(one) ? `${used(one).used}/${used(one).max_uses}` : "-"), "right"],
    ["Ends", (one) => (one.capability.expires_at === null ? "-" : when(one.capability.expires_at))],
    ["Act", (one) => bySignature.get(one.signature)?.revoked === false && html`<${Act} name="revoke" act=${revoke(one)}
      about=${`${line(one.capability.subject.display)} may ${line(one.capability.action)}. The grant ends now, and with it each grant that was narrowed from it.`} />`],
  ];
  const peerColumns = [
    ["Peer", (one) => line(one.agent_id.display)],
    ["Token begins", (one) => html`<span class="mono">${line(one.token_prefix)}</span>`],
    ["Since", (one) => html`<${Time} ms=${one.registered_at} />`],
    ["State", (one) => (one.revoked_at === null ? (one.expires_at ? `until ${when(one.expires_at)}` : "live") : `revoked ${when(one.revoked_at)}`)],
    ["Key", (one) => html`<span class="mono">${line(one.agent_id.pubkey)}</span>`],
    ["Act", (one) => one.revoked_at === null && html`<${Act} name="let in no more" act=${revokePeer(one)}
      about=${`${line(one.agent_id.display)}, token ${line(one.token_prefix)}: its streams end, and its next connection is refused.`} />`],
  ];
  return html`<${Title}>Grants and peers<//>
    <${Problem} error=${error} /><${Problem} error=${usesError} /><${Problem} error=${peersError} />
    <${Table} caption="Grants to you and by you" columns=${grantColumns} rows=${grants?.capabilities ?? []} keyOf=${(one) => one.signature} />
    <${Table} caption="Who may connect to the daemon" columns=${peerColumns} rows=${peers?.peers ?? []}
      keyOf=${(one) => `${one.token_prefix} ${one.registered_at}`} />`;
}

// The parts that pages are made of.
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { changes } from "./live.js";
import { fields, isBad, told } from "./rows.js";
import { line, when } from "./text.js";

// Ask now, and again when one of the stores `topics` changes. Returns [document or null, error or null, ask again].
export function useAnswer(ask, topics = [], also = []) {
  const [answer, set] = useState([null, null]);
  const [turn, again] = useState(0);
  const numbers = topics.map((topic) => changes.value[topic] ?? 0);
  useEffect(() => {
    let gone = false;
    ask().then((document) => gone || set([document, null]), (error) => gone || set([null, error]));
    return () => {
      gone = true;
    };
  }, [turn, ...numbers, ...also]);
  return [...answer, () => again((value) => value + 1)];
}

export function Problem({ error }) {
  return error && html`<p class="note" role="alert">
    <span class="alarm">!</span> ${line(error.message, 1000)}${error.code ? html` [${line(error.code)}]` : ""}
    ${error.hint ? html`<br />fix: ${line(error.hint, 1000)}` : ""}
  </p>`;
}

// `columns`: [head, cell of a row, class]. Roles are written out: narrow screens show rows as blocks.
export function Table({ caption, columns, rows, keyOf, empty = "none" }) {
  if (!rows.length) return html`<p><strong>${caption}</strong>: <span class="soft">${empty}</span></p>`;
  return html`<table role="table">
    <caption>${caption}</caption>
    <thead role="rowgroup"><tr role="row">
      ${columns.map(([head, , kind]) => html`<th role="columnheader" scope="col" class=${kind}>${head}</th>`)}
    </tr></thead>
    <tbody role="rowgroup">${rows.map((row) => html`<tr role="row" key=${keyOf(row)}>
      ${columns.map(([head, cell, kind]) => html`<td role="cell" class=${kind} data-head=${head}>${cell(row)}</td>`)}
    </tr>`)}</tbody>
  </table>`;
}

export function Time({ ms }) {
  return html`<time datetime=${when(ms)} class="mono">${when(ms)}</time>`;
}

// A text of an agent may have half of a surrogate pair, which no address can hold.
const part = (id) => encodeURIComponent(String(id).replace(/\p{Cs}/gu, "\ufffd"));
const shortLink = (page) => (id) => (id ? html`<a class="mono" href=${`#/${page}/${part(id)}`}>${line(id).slice(0, 8)}</a>` : "-");
export const runLink = shortLink("runs");
export const intentLink = shortLink("intents");
export const workspaceLink = shortLink("workspaces");
export const sessionLink = shortLink("sessions");
export const taskLink = (id) => html`<a class="mono" href=${`#/mailbox/${part(id)}`}>${line(id, 40)}</a>`;
export const agentLink = (id) => (id ? html`<a href=${`#/agents/${part(id)}`}>${line(id)}</a>` : "-");

// Rows of the log as a timeline, the oldest first.
export function Steps({ events, without, of }) {
  if (!events.length) return html`<p class="soft">none of ${of} is about it</p>`;
  return html`<ol class="timeline">${events.map((event) => {
    const one = fields(event);
    return html`<li key=${event.id} class=${isBad(one) ? "bad" : ""}>
      <${Time} ms=${event.timestamp_ms} /> <strong>${isBad(one) ? "! " : ""}${line(one.type)}</strong>
      ${one.own ? "" : html` <span class="soft">(supervisor)</span>`}
      <div class="mono">${line(told(one, without), 600)}</div>
    </li>`;
  })}</ol>`;
}

let arrived = false;

// The title of a further page takes the focus, so that a screen reader says where it is.
export function Title({ children }) {
  const element = useRef(null);
  useEffect(() => {
    document.title = `${element.current.textContent} - Covenant`;
    if (arrived) element.current.focus();
    arrived = true;
  }, []);
  return html`<h1 tabindex="-1" ref=${element}>${children}</h1>`;
}

// A button that asks before it acts; `act` returns the line that says what came of it.
export function Act({ name, about, act, done }) {
  const dialog = useRef(null);
  const [said, say] = useState("");
  async function go() {
    dialog.current.close();
    try {
      say(await act());
      done?.();
    } catch (error) {
      say(`! ${error.message}${error.hint ? `; fix: ${error.hint}` : ""}`);
    }
  }
  return html`<button type="button" onClick=${() => dialog.current.showModal()}>${name}</button>
    <span role="status">${line(said, 1000)}</span>
    <dialog ref=${dialog} aria-label=${name}>
      <p>${about}</p>
      <button type="button" class="main" onClick=${go}>${name}</button>
      <button type="button" onClick=${() => dialog.current.close()}>cancel</button>
    </dialog>`;
}

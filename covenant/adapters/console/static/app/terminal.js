// A terminal of a session: what the agent writes comes as events of one request, what is typed goes by others.
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { Problem } from "./parts.js";
import { attach, envelopes, Refused, type } from "./session.js";
import { line } from "./text.js";

const MOST = 16384;
const DETACHES = "\x10\x11";
const bytesOf = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));

// xterm.js writes rules into style elements, which the content policy forbids: these go into sheets of the document.
class StyleSheet extends HTMLElement {
  sheet = new CSSStyleSheet();
  connectedCallback() {
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, this.sheet];
  }
  disconnectedCallback() {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((one) => one !== this.sheet);
  }
  set textContent(text) {
    this.sheet.replaceSync(text);
  }
}
customElements.define("style-sheet", StyleSheet);

function options() {
  const style = getComputedStyle(document.documentElement);
  const [background, foreground] = ["--panel", "--text"].map((name) => style.getPropertyValue(name).trim());
  return { theme: { background, foreground, cursor: foreground, selectionBackground: foreground, selectionForeground: background },
    // A link that an agent wrote opens nothing.
    linkHandler: { activate() {} }, minimumContrastRatio: 4.5, fontSize: 14, scrollback: 5000, cols: 80, rows: 24 };
}

// As many cells as fit.
function fit(terminal, place) {
  const screen = place.querySelector(".xterm-screen");
  const [width, height] = [screen.clientWidth / terminal.cols, screen.clientHeight / terminal.rows];
  const high = Math.max(200, innerHeight - place.getBoundingClientRect().top - scrollY - 60);
  if (width && height) terminal.resize(Math.max(20, Math.min(500, Math.floor((place.clientWidth - 24) / width))), Math.max(8, Math.min(200, Math.floor(high / height))));
}

// What is typed, in order, one request at a time; what comes meanwhile goes with the next one.
function typist(name, failed) {
  let [waits, busy] = ["", false];
  return async (text) => {
    waits += text;
    if (busy) return;
    busy = true;
    while (waits) {
      const data = waits.slice(0, MOST);
      waits = waits.slice(MOST);
      await type({ terminal: name(), data }).catch(failed);
    }
    busy = false;
  };
}

// Reads the events of an attachment until its end; `take` gets each chunk.
async function read(body, take) {
  for await (const envelope of envelopes(body)) {
    if (envelope.kind === "stream_chunk") take(envelope.chunk);
    if (envelope.kind === "stream_error") throw new Refused(envelope);
    if (envelope.kind === "stream_end") return envelope.summary;
  }
  throw new Refused({ message: "the connection to the daemon ended", hint: "attach again: the session goes on" });
}

async function connect(place, run, { Terminal, say, fail, end, aloud }) {
  const terminal = new Terminal({ ...options(), screenReaderMode: aloud });
  terminal.open(place);
  fit(terminal, place);
  const [abort, known] = [new AbortController(), { name: "" }];
  const typed = typist(() => known.name, fail);
  const detach = () => abort.abort();
  // Ctrl-P Ctrl-Q detaches, as in `covenant attach`; a Ctrl-P alone goes with the next key.
  let held = "";
  terminal.onData((text) => {
    held = known.name ? held + text : "";
    if (held === DETACHES) return detach();
    if (held === "\x10" || !held) return undefined;
    const data = held;
    held = "";
    return typed(data);
  });
  terminal.onResize(({ rows, cols }) => known.name && type({ terminal: known.name, rows, columns: cols }).catch(fail));
  const resized = () => fit(terminal, place);
  addEventListener("resize", resized, { signal: abort.signal });
  const live = async () => {
    try {
      const body = await attach({ run, rows: terminal.rows, columns: terminal.cols }, abort.signal);
      say("attached; Ctrl-P Ctrl-Q detaches and leaves the terminal");
      terminal.focus();
      const done = await read(body, (chunk) => {
        if (chunk.terminal) known.name = chunk.terminal;
        if (chunk.data) terminal.write(bytesOf(chunk.data));
      });
      const { status, exit_status, message } = done.record ?? {};
      say(`${done.reason}${status ? `: ${status}` : ""}${exit_status === undefined || exit_status === null ? "" : `, exit status ${exit_status}`}${message ? `, ${message}` : ""}`);
    } catch (error) {
      if (abort.signal.aborted) say("detached; the session goes on");
      else fail(error);
    }
    known.name = "";
    abort.abort();
    end();
  };
  live();
  return { detach, dispose: () => (detach(), terminal.dispose()) };
}

export function SessionTerminal({ run }) {
  const [place, back, held] = [useRef(null), useRef(null), useRef(null)];
  const [said, say] = useState("");
  const [error, fail] = useState(null);
  const [live, set] = useState(false);
  const [aloud, setAloud] = useState(false);
  useEffect(() => () => held.current?.dispose(), []);
  async function go() {
    held.current?.dispose();
    fail(null);
    set(true);
    const end = () => {
      set(false);
      back.current?.focus();
    };
    try {
      const { Terminal } = await import("../vendor/xterm.js");
      held.current = await connect(place.current, run, { Terminal, say, fail, end, aloud });
    } catch {
      fail({ message: "the terminal's program cannot be loaded", hint: "reload the page" });
      set(false);
    }
  }
  return html`<p>
      <button type="button" class="main" ref=${back} onClick=${live ? () => held.current?.detach() : go}>${live ? "detach" : "attach"}</button>
      <label><input type="checkbox" checked=${aloud} disabled=${live} onChange=${(event) => setAloud(event.target.checked)} /> read the screen out</label>
    </p>
    <p role="status">${line(said, 500)}</p><${Problem} error=${error} />
    <div class="screen" ref=${place}></div>`;
}

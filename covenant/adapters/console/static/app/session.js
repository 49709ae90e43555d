// The session of this tab. Its cookie is out of reach for scripts; the other half, worthless without the cookie, is kept
// for this tab and this origin. The token of the operator never comes here.
import { signal } from "../vendor/signals-core.js";

const HALF = "covenant-page-half";
// The key that the log's checkpoints are signed with, as the login said: no secret.
const LOG_KEY = "covenant-log-key";
// "in", "out", or "" until it is known; and why this tab is out.
export const state = signal("");
export const why = signal("");

function headers() {
  return { "Content-Type": "application/json", "X-Covenant-Page": sessionStorage.getItem(HALF) ?? "" };
}

// An error document of the daemon, with the fix.
export class Refused extends Error {
  constructor(document) {
    super(document.message ?? "the daemon did not say why");
    this.code = document.code ?? "";
    this.hint = document.hint ?? "";
  }
}

export function leave(reason) {
  sessionStorage.removeItem(HALF);
  why.value = reason;
  state.value = "out";
}

// The number of requests that wait for an answer.
export const asking = signal(0);

async function post(path, body) {
  let answer, document;
  asking.value += 1;
  try {
    answer = await fetch(`/console/${path}`, { method: "POST", headers: headers(), body: JSON.stringify(body) });
    document = await answer.json();
  } catch {
    throw new Refused({ message: "the daemon does not answer", hint: "start it: covenantd" });
  } finally {
    asking.value -= 1;
  }
  if (answer.status === 401 && path !== "login") leave(document.message);
  if (document.kind === "error" || !answer.ok) throw new Refused(document);
  return document;
}

// Take the code out of the address at once, so that neither the history nor a reload has it.
export async function enter() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code === null) {
    if (state.value === "") state.value = sessionStorage.getItem(HALF) ? "in" : "out";
    return;
  }
  history.replaceState(null, "", "/#/");
  try {
    const { page, log_key } = await post("login", { code });
    sessionStorage.setItem(HALF, page);
    sessionStorage.setItem(LOG_KEY, log_key);
    state.value = "in";
  } catch (error) {
    // A link that was used already does not end the session of this tab.
    if (!sessionStorage.getItem(HALF)) return leave(error.message);
    state.value = "in";
  }
}

export const logKey = () => sessionStorage.getItem(LOG_KEY) ?? "";

export async function logOut() {
  await post("logout", {}).catch(() => {});
  leave("this tab is logged out");
}

export const daemon = (kind, fields = {}) => post("ask", { ...fields, of: "daemon", kind });
export const supervisor = (kind, fields = {}) => post("ask", { ...fields, of: "supervisor", kind });
export const packages = (kind, fields) => post("ask", { ...fields, of: "packages", kind });
export const events = (signal) => fetch("/console/live", { headers: headers(), signal });

export const type = (fields) => post("type", fields);

// Returns the body of the events of an attachment, or throws what the daemon says instead.
export async function attach(fields, signal) {
  const answer = await fetch("/console/attach", { method: "POST", headers: headers(), body: JSON.stringify(fields), signal });
  if (answer.headers.get("Content-Type")?.startsWith("text/event-stream")) return answer.body;
  const document = await answer.json();
  if (answer.status === 401) leave(document.message);
  throw new Refused(document);
}

// The envelopes of a stream of the daemon, as they come.
export async function* envelopes(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((one) => one.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

// What the daemon sends while the page is open: the live runs, what they are held for, and numbers that grow with each change of a store.
import { signal } from "../vendor/signals-core.js";
import { envelopes, events, leave, state } from "./session.js";

export const runs = signal([]);
export const runsError = signal(null);
export const held = signal([]);
export const changes = signal({});
export const connected = signal(false);
const AGAIN_MS = 2000;

function take(chunk) {
  if (chunk.runs) {
    runsError.value = chunk.runs.kind === "error" ? chunk.runs : null;
    runs.value = chunk.runs.runs ?? [];
  }
  if (chunk.held) held.value = chunk.held;
  if (chunk.changes) changes.value = chunk.changes;
}

async function read(body) {
  for await (const envelope of envelopes(body)) {
    if (envelope.kind === "stream_chunk") take(envelope.chunk);
    if (envelope.kind === "stream_error") leave(envelope.message);
  }
}

// A browser has few connections to one host: a tab that is not seen gives its own back.
const seen = () => (document.hidden ? new Promise((resolve) => addEventListener("visibilitychange", resolve, { once: true })) : null);

export async function follow() {
  while (state.value === "in") {
    await seen();
    const abort = new AbortController();
    const hide = () => document.hidden && abort.abort();
    addEventListener("visibilitychange", hide, { signal: abort.signal });
    try {
      const answer = await events(abort.signal);
      if (answer.status === 401) leave((await answer.json()).message);
      if (!answer.ok) throw new Error(answer.statusText);
      connected.value = true;
      await read(answer.body);
    } catch {
      // The daemon is away or restarts; it is asked again.
    }
    abort.abort();
    connected.value = false;
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

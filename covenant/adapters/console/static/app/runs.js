// One run: its tree as a picture, and what happened in it in the order of time.
import { useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { html } from "./html.js";
import { runs, runsError } from "./live.js";
import { runColumns } from "./overview.js";
import { Act, Problem, Steps, Table, Title, useAnswer } from "./parts.js";
import { fields } from "./rows.js";
import { daemon, supervisor } from "./session.js";
import { line, shown } from "./text.js";

const ROWS = 2000;
const REASON = "asked for in the web console";
const ACTS = {
  suspend: "It stops where it is, its sandbox included; its clocks run on.",
  resume: "It goes on where it was suspended.",
  kill: "Its processes are killed and its sandbox is removed. This cannot be undone.",
};

function Operations({ run }) {
  const operate = (operation, tree) => async () => {
    const done = await supervisor("operate", { operation, run: run.run_id, tree, reason: REASON });
    return `${operation}: ${done.runs.length} runs`;
  };
  const about = (verb) => `Run ${run.run_id.slice(0, 8)} of agent ${line(run.agent_id)}, ${line(run.state)}. ${ACTS[verb]}
    The log has it with the reason: ${REASON}.`;
  return html`<p>
    ${Object.keys(ACTS).map((verb) => html`<${Act} key=${verb} name=${verb} about=${about(verb)} act=${operate(verb, false)} />`)}
    <${Act} name="kill the tree" about=${`${about("kill")} Every run below it too.`} act=${operate("kill", true)} />
  </p>`;
}

// A run with its parents and descendants among live runs, parents first.
function family(id) {
  const byId = new Map(runs.value.map((one) => [one.run_id, one]));
  let root = byId.get(id);
  while (root && byId.has(root.parent)) root = byId.get(root.parent);
  const found = [];
  const add = (one, depth) => {
    found.push({ ...one, depth });
    for (const child of runs.value) if (child.parent === one.run_id && depth < 32) add(child, depth + 1);
  };
  if (root) add(root, 0);
  return found;
}

const [WIDTH, HEIGHT, STEP, INDENT] = [260, 48, 64, 60];
// The least of a narrow window, in which boxes are nearer to each other and then narrower; below that it scrolls.
const [LEAST_WIDTH, LEAST_INDENT, MARGIN] = [180, 20, 8];

// The place that the page has for an element, now and after each change of the window.
function useWidth() {
  const [width, setWidth] = useState(Infinity);
  const place = useRef(null);
  useLayoutEffect(() => {
    const look = () => setWidth(place.current.clientWidth);
    const observer = new ResizeObserver(look);
    observer.observe(place.current);
    look();
    return () => observer.disconnect();
  }, []);
  return [place, width];
}

// What an agent is called may be wider than its box: the inner picture ends where the box does.
function Box({ run, x, y, width, chosen }) {
  const denied = run.denied ? `! ${run.denied} denied ` : "";
  return html`<rect class=${`box ${run.denied ? "denied" : ""}`} x=${x} y=${y} width=${width} height=${HEIGHT} rx="6" />
    <svg x=${x + 10} y=${y} width=${width - 20} height=${HEIGHT}>
      <text y="20" font-weight=${chosen ? "700" : "400"}>${line(run.agent_id).slice(0, 40)}</text>
      <text y="38">${run.run_id.slice(0, 8)} ${denied}${line(run.state).slice(0, 24)}</text>
    </svg>`;
}

export function Tree({ rows, of }) {
  const [box, room] = useWidth();
  const deepest = Math.max(0, ...rows.map((one) => one.depth));
  const free = room - 2 * MARGIN;
  const indent = Math.min(INDENT, Math.max(LEAST_INDENT, Math.floor((free - WIDTH) / Math.max(1, deepest))));
  const wide = Math.min(WIDTH, Math.max(LEAST_WIDTH, free - indent * deepest));
  const place = new Map(rows.map((one, at) => [one.run_id, [MARGIN + indent * one.depth, MARGIN + STEP * at]]));
  const [width, height] = [2 * MARGIN + wide + indent * deepest, STEP * rows.length];
  return html`<div class="wide" ref=${box} tabindex="0" role="region" aria-label="The delegation tree">
    <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img"
      aria-label=${`The delegation tree: ${rows.length} runs; the table of live runs on the overview says the same`}>
      ${rows.map((one) => {
        const [x, y] = place.get(one.run_id);
        const [px, py] = place.get(one.parent) ?? [];
        return html`<g key=${one.run_id}>
          ${px !== undefined && html`<path class="edge" d=${`M${px + indent / 3} ${py + HEIGHT}V${y + HEIGHT / 2}H${x}`} />`}
          <${Box} run=${one} x=${x} y=${y} width=${wide} chosen=${one.run_id === of} />
        </g>`;
      })}
    </svg>
  </div>`;
}

function costs(steps) {
  const sum = { requests: 0, input_tokens: 0, output_tokens: 0, credits: 0 };
  for (const one of steps.map(fields).filter((each) => each.type === "model_asked")) {
    sum.requests += 1;
    for (const name of ["input_tokens", "output_tokens", "credits"]) sum[name] += Number(one[name]) || 0;
  }
  return sum;
}

export function Run({ of }) {
  const live = runs.value.find((one) => one.run_id === of);
  const intent = live?.intent_id ? { intent_id: live.intent_id } : {};
  const asked = { limit: ROWS, extended: true, run_id: of, ...intent };
  const [log, error] = useAnswer(() => daemon("recent_audit", asked), ["audit"], [live?.intent_id]);
  const steps = [...(log?.events ?? [])].reverse();
  const sum = costs(steps);
  const near = family(of);
  return html`<${Title}>Run ${line(of).slice(0, 8)}<//>
    <${Problem} error=${error} /><${Problem} error=${runsError.value} />
    ${live ? html`<${Table} caption="Now" columns=${runColumns} rows=${[live]} keyOf=${(one) => one.run_id} /><${Operations} run=${live} />`
      : html`<p class="soft">It does not live now, or is not of the daemon's user.</p>`}
    ${near.length > 1 && html`<h2>Delegation tree</h2><${Tree} rows=${near} of=${of} />`}
    <h2>Costs at models</h2>
    <dl class="tiles">
      <div><dt>Requests</dt><dd>${sum.requests}</dd></div>
      <div><dt>Tokens in, out</dt><dd>${sum.input_tokens}, ${sum.output_tokens}</dd></div>
      <div><dt>Credits</dt><dd>${sum.credits}</dd></div>
    </dl>
    <h2>Timeline</h2>
    <${Steps} events=${steps} without=${["run_id"]} of="your rows of the log" />
    ${live && html`<${Stderr} run=${of} />`}`;
}

function Stderr({ run }) {
  const [logs, error] = useAnswer(() => supervisor("logs", { run, offset: 0, stream: "stderr" }));
  return html`<h2>stderr of the agent</h2><${Problem} error=${error} />
    <pre>${logs ? shown(logs.text) || "nothing" : ""}</pre>`;
}

export function Runs({ of }) {
  if (of) return html`<${Run} of=${of} />`;
  const roots = runs.value.filter((one) => !runs.value.some((other) => other.run_id === one.parent));
  const rows = roots.flatMap((one) => family(one.run_id));
  return html`<${Title}>Runs<//><${Problem} error=${runsError.value} />
    ${rows.length > 0 && html`<${Tree} rows=${rows} of="" />`}
    <${Table} caption="Live runs" columns=${runColumns} rows=${runs.value} keyOf=${(one) => one.run_id} />`;
}

// What was used: credits over time as a plot, and the same as tables.
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import uPlot from "../vendor/uplot.js";
import { html } from "./html.js";
import { Problem, Table, Time, Title, useAnswer } from "./parts.js";
import { daemon } from "./session.js";
import { line, when } from "./text.js";

const MOST = 1000;
const LINES = 6;
const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [4, 8], [1, 6]];

// The sum of credits of each payer over time, the largest first: [seconds, sums of the first, ...], and the names.
export function sums(receipts) {
  const totals = new Map();
  for (const one of receipts) totals.set(one.payer.display, (totals.get(one.payer.display) ?? 0) + one.credits_consumed);
  const names = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a)).slice(0, LINES);
  const now = new Map(names.map((name) => [name, 0]));
  const data = [[], ...names.map(() => [])];
  for (const one of [...receipts].sort((a, b) => a.settled_at - b.settled_at)) {
    if (!now.has(one.payer.display)) continue;
    now.set(one.payer.display, now.get(one.payer.display) + one.credits_consumed);
    data[0].push(one.settled_at / 1000);
    names.forEach((name, at) => data[at + 1].push(now.get(name)));
  }
  return { names, data };
}

// A plot is drawn with the colours of the moment: it is drawn anew where the scheme changes.
function useDark() {
  const asked = matchMedia("(prefers-color-scheme: dark)");
  const [dark, set] = useState(asked.matches);
  useEffect(() => {
    const changed = () => set(asked.matches);
    asked.addEventListener("change", changed);
    return () => asked.removeEventListener("change", changed);
  }, []);
  return dark;
}

function Plot({ names, data }) {
  const place = useRef(null);
  const dark = useDark();
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const [text, soft, link] = ["--text", "--line", "--link"].map((name) => style.getPropertyValue(name).trim());
    const axis = { stroke: text, grid: { stroke: soft }, ticks: { stroke: soft } };
    // One colour and different dashes: no colour is needed to tell the lines apart.
    const series = names.map((name, at) => ({ label: line(name, 40), stroke: at ? text : link, width: 2, dash: DASHES[at] }));
    const times = { ...axis, space: 120, values: (plot, seconds) => seconds.map((one) => when(one * 1000)) };
    const options = { width: place.current.clientWidth, height: 260, padding: [null, 48, null, null], series: [{ label: "time (UTC)" }, ...series], axes: [times, axis],
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"), legend: { live: false } };
    const plot = new uPlot(options, data, place.current);
    const resize = () => plot.setSize({ width: place.current.clientWidth, height: 260 });
    addEventListener("resize", resize);
    return () => {
      removeEventListener("resize", resize);
      plot.destroy();
    };
  }, [JSON.stringify([names, data[0].length]), dark]);
  return html`<div class="panel plot" ref=${place} role="img"
    aria-label=${`Credits over time of ${names.map((name) => line(name, 40)).join(", ")}; the tables below say the same`}></div>`;
}

const totalsOf = (receipts) => {
  const totals = new Map();
  for (const one of receipts) {
    const known = totals.get(one.payer.display) ?? { name: one.payer.display, credits: 0, count: 0 };
    totals.set(known.name, { ...known, credits: known.credits + one.credits_consumed, count: known.count + 1 });
  }
  return [...totals.values()].sort((a, b) => b.credits - a.credits);
};

export function Budgets() {
  const [receipts, error] = useAnswer(() => daemon("recent_receipts", { limit: MOST }), ["audit"]);
  const [debits, debitsError] = useAnswer(() => daemon("recent_debits", { limit: 100 }), ["audit"]);
  const [agents] = useAnswer(() => daemon("list_agents"), ["audit"]);
  const found = receipts?.receipts ?? [];
  const budgets = (agents?.agents ?? []).filter((one) => one.id && one.budget_credits_per_hour);
  const { names, data } = sums(found);
  return html`<${Title}>Budgets<//><${Problem} error=${error} /><${Problem} error=${debitsError} />
    ${found.length > 0 && html`<h2>Credits over time</h2><${Plot} names=${names} data=${data} />`}
    <${Table} caption="Credits of each payer" rows=${totalsOf(found)} keyOf=${(one) => one.name}
      columns=${[["Payer", (one) => line(one.name)], ["Receipts", (one) => one.count, "right"], ["Credits", (one) => one.credits, "right"]]} />
    <${Table} caption="Budgets of agents" rows=${budgets} keyOf=${(one) => one.directory}
      columns=${[["Agent", (one) => line(one.id)], ["Credits an hour", (one) => one.budget_credits_per_hour, "right"]]} />
    <${Table} caption="The newest receipts" rows=${found.slice(0, 50)} keyOf=${(one) => one.id}
      columns=${[["Time", (one) => html`<${Time} ms=${one.settled_at} />`], ["Payer", (one) => line(one.payer.display)],
        ["For", (one) => line(one.resource)], ["Batch", (one) => line(one.batch_id ?? "-", 12)], ["Credits", (one) => one.credits_consumed, "right"]]} />
    <${Table} caption="The newest debits" rows=${debits?.debits ?? []} keyOf=${(one) => `${one.paired_receipt} ${one.at_ms}`}
      columns=${[["Time", (one) => html`<${Time} ms=${one.at_ms} />`], ["Agent", (one) => line(one.agent.display)],
        ["Receipt", (one) => line(one.paired_receipt).slice(0, 8)], ["Credits", (one) => one.credits, "right"]]} />`;
}

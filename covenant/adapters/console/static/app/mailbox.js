// The mailbox: tasks between agents, and their results.
import { html } from "./html.js";
import { Act, Problem, taskLink, Table, Title, useAnswer } from "./parts.js";
import { daemon } from "./session.js";
import { line, shown, when } from "./text.js";

const MOST = 200;
const REASON = "taken back in the web console";
const ended = (one) => one.error_message || (one.content ?? []).map((block) => block.text ?? "").join(" ");

const taskColumns = [
  ["State", (one) => line(one.state)],
  ["Task", (one) => taskLink(one.task.id)],
  ["From", (one) => line(one.task.sender.display)],
  ["To", (one) => line(one.task.recipient.display)],
  ["Try", (one) => one.attempt ?? "-", "right"],
  ["Text", (one) => line(one.task.intent_text)],
];
const resultColumns = [
  ["Status", (one) => (one.status === "error" ? html`<span class="alarm">! error</span>` : line(one.status))],
  ["Task", (one) => taskLink(one.task_id)],
  ["Text", (one) => line(ended(one))],
];

function About({ rows }) {
  return html`<table role="table"><caption>About it</caption><tbody role="rowgroup">${rows.filter(([, value]) => value).map(
    ([name, value]) => html`<tr role="row"><th role="rowheader" scope="row">${name}</th><td role="cell">${line(value, 1000)}</td></tr>`,
  )}</tbody></table>`;
}

function Task({ of }) {
  const [queue, error] = useAnswer(() => daemon("a2_a_queue", { limit: MOST }), ["audit"]);
  const [tasks, tasksError] = useAnswer(() => daemon("recent_a2_a_tasks", { limit: MOST }), ["audit"]);
  const [found, resultError] = useAnswer(() => daemon("recent_a2_a_results", { limit: 1, task_id: of }), ["audit"]);
  const open = queue?.tasks.find((one) => one.task.id === of);
  const task = open?.task ?? tasks?.tasks.find((one) => one.id === of);
  const result = found?.results[0];
  const cancel = async () => {
    const done = await daemon("cancel_a2_a_task", { task_id: of, reason: REASON });
    return done.cancelled ? "taken back" : "! it has ended already";
  };
  const rows = [
    ["State", open?.state ?? (result ? "ended" : "")],
    ["From", task?.sender.display],
    ["To", task?.recipient.display],
    ["Kind", task?.task_kind],
    ["Deadline", task?.deadline_ms ? when(task.deadline_ms) : ""],
    ["Leased to", open?.leased_to?.display],
    ["Attempt", open?.attempt],
  ];
  return html`<${Title}>Task ${line(of, 40)}<//>
    <${Problem} error=${error} /><${Problem} error=${tasksError} /><${Problem} error=${resultError} />
    ${task ? html`<${About} rows=${rows} /><h2>Text</h2><pre tabindex="0">${shown(task.intent_text)}</pre>`
      : tasks && html`<p class="soft">It is none of the newest ${MOST} tasks that you may see.</p>`}
    ${open && html`<${Act} name="take it back" act=${cancel}
      about=${`Task ${line(of, 80)} for ${line(task.recipient.display)} ends without an answer; its sender alone may do that. The log has it with the reason: ${REASON}.`} />`}
    ${result && html`<h2>Result: ${line(result.status)}</h2><pre tabindex="0">${shown(ended(result))}</pre>`}`;
}

function List() {
  const [queue, error] = useAnswer(() => daemon("a2_a_queue", { limit: MOST }), ["audit"]);
  const [results, resultsError] = useAnswer(() => daemon("recent_a2_a_results", { limit: MOST }), ["audit"]);
  return html`<${Title}>Mailbox<//><${Problem} error=${error} /><${Problem} error=${resultsError} />
    <${Table} caption="Tasks without an answer" columns=${taskColumns} rows=${queue?.tasks ?? []} keyOf=${(one) => one.task.id} />
    <${Table} caption="The newest results" columns=${resultColumns} rows=${results?.results ?? []} keyOf=${(one) => one.task_id} />`;
}

export const Mailbox = ({ of }) => (of ? html`<${Task} of=${of} />` : html`<${List} />`);

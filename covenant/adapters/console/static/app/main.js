// The console: a login, a menu, and one page for each address behind #.
import { render } from "../vendor/preact.js";
import { useEffect, useErrorBoundary } from "../vendor/hooks.js";
import { signal } from "../vendor/signals.js";
import { Agents } from "./agents.js";
import { Audit } from "./audit.js";
import { Budgets } from "./budgets.js";
import { Approvals, Denials } from "./decide.js";
import { html } from "./html.js";
import { Intents } from "./intents.js";
import { connected, follow } from "./live.js";
import { Mailbox } from "./mailbox.js";
import { Overview } from "./overview.js";
import { Problem } from "./parts.js";
import { Runs } from "./runs.js";
import { Sessions } from "./sessions.js";
import { asking, enter, logOut, state, why } from "./session.js";
import { Capabilities, Memory } from "./stores.js";
import { line } from "./text.js";
import { Workspaces } from "./workspaces.js";

// The first part of the address -> the name in the menu, and the page, which is given the second part.
const PAGES = {
  "": ["Overview", Overview],
  runs: ["Runs", Runs],
  sessions: ["Sessions", Sessions],
  intents: ["Intents", Intents],
  workspaces: ["Workspaces", Workspaces],
  agents: ["Agents", Agents],
  denials: ["Denials", Denials],
  approvals: ["Approvals", Approvals],
  audit: ["Audit", Audit],
  memory: ["Memory", Memory],
  mailbox: ["Mailbox", Mailbox],
  budgets: ["Budgets", Budgets],
  grants: ["Grants and peers", Capabilities],
};
const address = signal(["", ""]);

function look() {
  const [first = "", second = ""] = location.hash.replace(/^#\/?/, "").split("/");
  try {
    address.value = [first, decodeURIComponent(second)];
  } catch {
    address.value = ["", ""];
  }
}

function LogIn() {
  return html`<main class="login" id="main">
    <h1>Covenant</h1>
    ${why.value ? html`<p class="note" role="alert">${line(why.value)}</p>` : ""}
    <p>This tab is not logged in. In a terminal of the operator:</p>
    <pre>covenant console</pre>
    <p>It prints a link that logs one tab in, once, within two minutes.</p>
  </main>`;
}

// A page that fails on an answer that it does not understand says so, and the menu stays.
function Guarded({ of, Page }) {
  const [error, again] = useErrorBoundary();
  if (!error) return html`<${Page} of=${of} />`;
  return html`<h1>Error</h1><${Problem} error=${{ message: `the answer cannot be shown: ${error}` }} />
    <button type="button" onClick=${again}>try again</button>`;
}

function Console() {
  useEffect(() => {
    follow();
  }, []);
  const [first, second] = address.value;
  const [, Page] = PAGES[first] ?? PAGES[""];
  const menu = Object.entries(PAGES).filter(([, [name]]) => name);
  return html`<a class="skip" href="#main" onClick=${skip}>to the page</a>
    <header class="head">
      <span class="name">Covenant</span>
      <nav aria-label="Pages"><ul>${menu.map(([part, [name]]) => html`<li>
        <a href=${`#/${part}`} aria-current=${part === first ? "page" : null}>${name}</a>
      </li>`)}</ul></nav>
      <span class="state" role="status">${connected.value ? "live" : "! not connected"}</span>
      <button type="button" onClick=${logOut}>log out</button>
    </header>
    <main id="main" tabindex="-1" aria-busy=${asking.value > 0}><${Guarded} key=${`${first}/${second}`} of=${second} Page=${Page} /></main>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function App() {
  if (state.value === "") return null;
  return state.value === "in" ? html`<${Console} />` : html`<${LogIn} />`;
}

async function arrive() {
  await enter();
  look();
}

addEventListener("hashchange", arrive);
await arrive();
render(html`<${App} />`, document.getElementById("app"));

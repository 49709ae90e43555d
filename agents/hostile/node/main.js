"use strict";

// An agent that tries to get out: the probes of ../network.toml with package = "node".
require("./gate.js").requireGvisor();

// Only now, and only here: nothing hostile is even loaded anywhere else.
const { PROBES } = require("./probes.js");
const fs = require("node:fs");

const DEADLINE_MS = 20000;

function row(probe, outcome, errno, detail) {
  return { probe, outcome, errno, detail: String(detail).slice(0, 300) };
}

async function attempt(name) {
  if (!PROBES[name]) return row(name, "broken", null, "no probe of this package has that name");
  let timer;
  const hung = new Promise((done) => {
    timer = setTimeout(() => done(row(name, "hung", null, "no answer")), DEADLINE_MS);
  });
  const ran = PROBES[name]().then(
    (detail) => row(name, "succeeded", null, detail),
    (error) => row(name, error.code || error.blocked ? "blocked" : "broken", error.code || null, error.message),
  );
  const first = await Promise.race([ran, hung]);
  clearTimeout(timer);
  return first;
}

async function main() {
  const text = JSON.parse(fs.readFileSync(0, "utf8").split("\n")[0]).text.trim();
  const rows = [];
  for (const name of text.replace(/^batch:/, "").split(",")) rows.push(await attempt(name));
  fs.writeSync(1, JSON.stringify({ text: JSON.stringify(rows), sources: [] }) + "\n");
  process.exit(0);
}

main();

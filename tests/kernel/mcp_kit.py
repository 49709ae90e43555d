"""Packages of MCP as they are published, in directories that an agent can be granted: the SDK, and its test suite."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests import tools_kit as kit
from tests.kernel.world import ROOT

WHEELS: Final = Path(__file__).with_name("mcp_wheels.txt")
SUITE: Final = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE: Final = "/usr/bin/node"
_PROGRAM: Final = "node_modules/@modelcontextprotocol/conformance/dist/index.js"
# The suite imports a function of newer Nodes, which only its command `tier-check` calls.
_HOOK: Final = """\
import { register } from "node:module";
const url = (text) => "data:text/javascript," + encodeURIComponent(text);
const files = url('export * from "node:fs"; export { default } from "node:fs"; export const globSync = () => [];');
const isOther = '(s, c, n) => s === "fs" && !c.parentURL?.startsWith("data:")';
const one = `{ url: ${JSON.stringify(files)}, shortCircuit: true }`;
register(url(`const is = ${isOther}; export const resolve = async (s, c, n) => is(s, c) ? ${one} : n(s, c);`));
"""
_LINE: Final = re.compile(r"^[\u2713\u2717] (\S+): (\d+) passed, (\d+) failed$", re.MULTILINE)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@contextlib.contextmanager
def sdk() -> Iterator[Path]:
    """Install the SDK without running a script of a package."""
    with _folder() as made:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
        command = [*pip, "--disable-pip-version-check", "--root-user-action", "ignore", "--target", str(made)]
        subprocess.run([*command, "--requirement", str(WHEELS)], check=True, timeout=500)
        subprocess.run(["chmod", "-R", "go-w", made], check=True, timeout=60)
        yield made


@contextlib.contextmanager
def suite() -> Iterator[Path]:
    """Install the conformance suite without running a script of a package."""
    with _folder() as made:
        npm_install(made, SUITE)
        (made / "hook.mjs").write_text(_HOOK)
        subprocess.run(["chmod", "-R", "go-w", made], check=True, timeout=60)
        yield made


def npm_install(folder: Path, wanted: str) -> None:
    """Install a package of npm, and what it needs, in a directory."""
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    subprocess.run([*npm, "--prefix", str(folder), wanted], check=True, timeout=500, cwd=folder)


def command(suite: Path, *words: str) -> list[str]:
    """Return the command of a run of the suite."""
    return [NODE, "--import", str(suite / "hook.mjs"), str(suite / _PROGRAM), *words]


def ran(suite: Path, *words: str) -> dict[str, tuple[int, int]]:
    """Run the suite and return its results."""
    done = subprocess.run(command(suite, *words), capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    found = results(done.stdout)
    assert found, (done.stdout[-3000:], done.stderr[-3000:])
    return found


def results(said: str) -> dict[str, tuple[int, int]]:
    """Return the checks of each scenario that passed and failed, from what the suite wrote."""
    return {name: (int(passed), int(failed)) for name, passed, failed in _LINE.findall(said)}


def files_of(folder: Path, prefix: str) -> dict[str, bytes]:
    """The files that a server reads: with types and maps of sources they were more than a package may have."""
    left_out = (".ts", ".mts", ".cts", ".map", ".md")
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(left_out))
    return {f"{prefix}{path.relative_to(folder)}": path.read_bytes() for path in found}


def server(alias: str, version: str, command: str, args: list[str], env: list[str]) -> dict[str, Any]:
    """Return the entry of a server in tools.json, before it is asked for its tools."""
    tools = [{"name": "none", "description": "", "side_effect_class": "read"}]
    return {
        "alias": alias, "transport": "stdio", "command": command, "args": args, "env": env, "version": version,
        "package_digest": kit.FILLER, "tools": tools,
    }  # fmt: skip

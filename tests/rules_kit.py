"""Helpers for tests of the nine rules: a case that every rule accepts, and ways to change it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

from msgspec import structs

from policy import data, errors
from policy import package as packages
from policy.grants.effective import Effective
from policy.host import CgroupFacts, Closure, HostFacts, RunscFacts
from policy.manifest.agent import Manifest
from policy.manifest.parse import parse
from policy.rules import nine
from policy.rules.case import Case
from policy.rules.parent import Ancestor, Drawn, Parent
from tests import signing_kit as kit

NOW = kit.NOW
# One key a line, so that a place in an error is a line that a test can find.
MANIFEST = """\
[agent]
id = "hello"
name = "hello"
version = "0.1.0"
runtime = "python3"
entry = "main.py"

[resources]
network = "off"
memory_mb = 128
disk_mb = 16

[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "read-only-package"

[permissions.filesystem]
read = ["/srv/docs"]

[permissions.syscalls]
profile = "python3"
"""

HOST = HostFacts(
    arch="x86_64",
    kernel="6.1.0",
    audience=kit.HOST,
    cpus=2,
    memory_mb=4096,
    memory_available_mb=2048,
    disk_free_mb=10_000,
    pids_free=10_000,
    cgroup=CgroupFacts(2, frozenset({"cpu", "memory", "pids"})),
    runsc=RunscFacts("/usr/bin/runsc", "release-20240729.0", "ab" * 32),
    runtimes={"python3": Closure("python3", "/usr/bin/python3", ())},
)


def text(*changes: tuple[str, str], more: str = "") -> str:
    """The manifest with each (old, new) replaced, which must be there, and more lines after it."""
    out = MANIFEST
    for old, new in changes:
        assert old in out, old
        out = out.replace(old, new)
    return out + more


def manifest(*changes: tuple[str, str], more: str = "") -> Manifest:
    return parse(text(*changes, more=more).encode())


def line_of(document: str, start: str) -> str:
    """``agent.toml:LINE`` of the line that begins with ``start``."""
    number = next(i for i, line in enumerate(document.splitlines(), 1) if line.startswith(start))
    return f"agent.toml:{number}"


def signed(document: str, *, files: dict[str, bytes] | None = None, **statement: Any) -> packages.Package:
    contents = {"agent.toml": document.encode(), "main.py": b"print('hi')\n"} if files is None else files
    agent_id = tomllib.loads(document)["agent"]["id"]
    return kit.signed(files=contents, **{"agent_id": agent_id, **statement})


def case(
    document: str = MANIFEST,
    *,
    statement: dict[str, Any] | None = None,
    files: dict[str, bytes] | None = None,
    root: Any = None,
    **changes: Any,
) -> Case:
    """A case of this manifest, signed; ``changes`` are fields of Case."""
    read = parse(document.encode())
    trusted = kit.verify(signed(document, files=files, **(statement or {})), root)
    roles = data.roles()
    values: dict[str, Any] = {
        "trusted": trusted,
        "manifest": read,
        "requested": nine.requested(read, roles=roles),
        "host": HOST,
        "roles": roles,
        "deny": data.deny(),
        "never": data.never_grantable(),
        "parent": None,
        "identities": {},
        "now_ms": NOW,
    }
    return Case(**(values | changes))


PARENT_MANIFEST = MANIFEST.replace('id = "hello"', 'id = "boss"').replace("memory_mb = 128", "memory_mb = 1024") + (
    "\n[spawn]\nallowed = true\nmax_depth = 2\nmax_descendants = 3\n\n[lifetime]\nttl_seconds = 600\n"
)


def effective_of(document: str) -> Effective:
    return nine.requested(parse(document.encode()), roles=data.roles())


def parent(document: str = PARENT_MANIFEST, **changes: Any) -> Parent:
    """A root run that may have descendants and has none."""
    mine = effective_of(document)
    one = Ancestor("run-1", "boss", 0, mine.spawning, 0)
    values: dict[str, Any] = {
        "run_id": "run-1",
        "agent_id": "boss",
        "payload_digest": "cd" * 32,
        "effective": mine,
        "remaining_seconds": 600,
        "drawn": Drawn(),
        "ancestors": (one,),
    }
    return Parent(**(values | changes))


def ancestor(**changes: Any) -> Ancestor:
    return structs.replace(parent().ancestors[0], **changes)


def refusals(of: Case) -> dict[int, errors.CovenantError]:
    """Each rule run alone: the numbers of those that refuse, with their errors."""
    found: dict[int, errors.CovenantError] = {}
    for number, rule in enumerate(nine.RULES, 1):
        try:
            rule(of)
        except errors.CovenantError as e:
            found[number] = e
    return found


Build = Callable[[], Case]

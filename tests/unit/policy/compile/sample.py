"""Manifests and host facts of a made-up machine, for tests of the compilers."""

from __future__ import annotations

from typing import Any

from policy import data
from policy.compile import plan
from policy.compile.artefacts import Artefacts
from policy.grants.effective import Effective
from policy.host import CgroupFacts, Closure, ClosureFile, GrantedPath, HostFacts, RunscFacts
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.rules import nine

TOML = """\
[agent]
id = "sample"
name = "Sample"
version = "1"
runtime = "{runtime}"
entry = "main.py"
[resources]
network = "off"
{resources}
[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "{filesystem}"
{more}
"""


def manifest(
    *,
    more: str = "",
    resources: str = "",
    filesystem: str = "ephemeral",
    runtime: str = "python3",
    network: str = "off",
) -> Manifest:
    """A manifest; ``more`` is appended."""
    text = TOML.format(more=more, resources=resources, filesystem=filesystem, runtime=runtime)
    text = text.replace('network = "off"', f'network = "{network}"', 1)
    return parse.parse(text.encode())


def entries(*listed: tuple[str, str, str]) -> str:
    """``[[permissions.network]]`` of each (host, ports as TOML, protocol)."""
    table = '[[permissions.network]]\nhost = "{}"\nports = {}\nprotocol = "{}"\n'
    return "".join(table.format(*one) for one in listed)


def closure(name: str, entry: str) -> Closure:
    """A closure of three files."""
    return Closure(
        name,
        entry,
        (
            ClosureFile("/usr/lib/libc.so.6", "file", 0o644, 10, "c" * 64),
            ClosureFile(entry, "file", 0o755, 10, "a" * 64),
            ClosureFile("/lib", "symlink", target="usr/lib"),
        ),
    )


def host(*, room_mb: int = 0, **changes: Any) -> HostFacts:
    """A machine with a runsc, cgroup v1, python3 and what is named in ``changes``; ``room_mb`` at each granted path."""
    facts: dict[str, Any] = {
        "arch": "x86_64",
        "kernel": "6.1.0",
        "audience": "machine",
        "cpus": 2,
        "memory_mb": 16000,
        "memory_available_mb": 8000,
        "disk_free_mb": 8000,
        "pids_free": 10000,
        "cgroup": CgroupFacts(1, frozenset({"memory", "pids", "cpu"})),
        "runsc": RunscFacts("/usr/bin/runsc", "20240729.0", "b" * 64),
        "runtimes": {"python3": closure("python3", "/usr/bin/python3.11")},
        "executables": {path: closure(path, path) for path in ("/usr/bin/cat", "/usr/bin/grep")},
        "granted": {p: GrantedPath(p, "dir", room_mb) for p in ("/usr/share/doc", "/opt/a", "/opt/b", "/srv/data")},
    }
    return HostFacts(**{**facts, **changes})


def compiled(found: Manifest, facts: HostFacts | None = None, *, ceiling: Effective | None = None) -> Artefacts:
    """The artefacts of a manifest that needs no signature, below a parent's ``ceiling`` when there is one."""
    effective = nine.requested(found, roles=data.roles())
    if ceiling is not None:
        effective = ceiling.meet(effective)
    return plan.compile(effective, found, facts or host(), package_digest="d" * 64, parent=ceiling)

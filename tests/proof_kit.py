"""Helpers for tests of the proof: compiled policies with their decisions, and ways to falsify an artefact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from policy import data, prove
from policy.compile import plan
from policy.compile.artefacts import Artefacts, canonical
from policy.grants.effective import Effective
from policy.host import Closure, ClosureFile, GrantedPath, HostFacts, NetworkFacts
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.prove import Facts, Proof
from policy.rules import nine
from tests.unit.policy.compile import sample

PACKAGE = "d" * 64
PIN = "0123456789abcdef" * 4
DESTINATIONS = (
    ("api.example.com", "[443]", "tls"),
    ("*.example.org", '[80, "8000-8010"]', "tcp"),
    ("10.0.0.0/8", "[5432]", "tcp"),
    ("2001:db8::/32", "[53]", "udp"),
    ("203.0.113.9", "[443]", "tls"),
    ("8.8.4.0/24", "[853]", "tls"),
)
SUPERVISED = """
[permissions.credentials]
grants = ["mail", "db"]
[permissions.skills]
allow = ["matrix://tool/mcp/fs/read@1.0"]
side_effects = ["read"]
[[permissions.skills.rule]]
tool = "matrix://tool/mcp/fs/read@1.0"
argument = "path"
one_of = ["/a", 1]
[[permissions.skills.rule]]
tool = "matrix://tool/mcp/fs/read@1.0"
argument = "mode"
matches = "r+"
[spawn]
allowed = true
max_depth = 2
max_descendants = 5
on_parent_exit = "wind-down"
[lifetime]
ttl_seconds = 600
on_expiry = "suspend"
"""
PROGRAMS = f'[permissions.executables]\nallow = ["/usr/bin/grep@sha256:{PIN}", "/usr/bin/cat"]\n'
FILES = '[permissions.filesystem]\nread = ["/opt/a", "/usr/share/doc"]\n'


@dataclass(frozen=True)
class Case:
    """A decision, its compiled artefacts, and the other facts that the compiler had."""

    effective: Effective
    artefacts: Artefacts
    known: Facts

    def prove(self, artefacts: Artefacts | None = None) -> Proof:
        return prove.prove(self.effective, artefacts or self.artefacts, known=self.known)

    def falsified(self, *edits: Callable[[Documents], None]) -> Artefacts:
        """Return the artefacts after these edits, in canonical spelling: the output of a faulty compiler."""
        documents = Documents(self.artefacts)
        for edit in edits:
            edit(documents)
        return documents.artefacts()


class Documents:
    """Artefacts to be edited: JSON as values, the rules of the firewall as text, the filter as bytes."""

    def __init__(self, artefacts: Artefacts) -> None:
        self._json = {name: artefacts.json(name) for name in artefacts.files if name.endswith(".json")}
        self._raw = {name: raw for name, raw in artefacts.files.items() if name not in self._json}

    def __getitem__(self, name: str) -> Any:
        return self._json[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._json[name] = value

    @property
    def text(self) -> str:
        """The rules of the firewall."""
        return self._raw["firewall.nft"].decode()

    @text.setter
    def text(self, value: str) -> None:
        assert value != self.text
        self._raw["firewall.nft"] = value.encode()

    def nft(self, old: str, new: str, *, count: int = -1) -> None:
        """Write ``new`` for ``old``, which must be there."""
        assert old in self.text, old
        self.text = self.text.replace(old, new, count)

    def artefacts(self) -> Artefacts:
        return Artefacts({**self._raw, **{name: canonical(value) for name, value in self._json.items()}})


def host(**changes: Any) -> HostFacts:
    """The machine of the compilers' tests, with a pinned grep, node, a program of a package, and room at each path."""
    grep = Closure("/usr/bin/grep", "/usr/bin/grep", (ClosureFile("/usr/bin/grep", "file", 0o755, 9, PIN),))
    base = sample.host(room_mb=8)
    facts = structs.replace(
        base,
        executables={**base.executables, "/usr/bin/grep": grep},
        runtimes={
            **base.runtimes,
            "node": sample.closure("node", "/usr/bin/node"),
            "rust-bin": Closure("rust-bin", "", ()),
        },
        granted={**base.granted, "/opt/file": GrantedPath("/opt/file", "file")},
    )
    return structs.replace(facts, **changes)


def case(manifest: Manifest, facts: HostFacts | None = None, *, ceiling: Effective | None = None) -> Case:
    """A manifest compiled for a machine, below a parent's ceiling when there is one."""
    facts = facts or host()
    effective = nine.requested(manifest, roles=data.roles())
    if ceiling is not None:
        effective = ceiling.meet(effective)
    artefacts = plan.compile(effective, manifest, facts, package_digest=PACKAGE, parent=ceiling)
    return Case(effective, artefacts, Facts.of(manifest, facts, PACKAGE))


def _with_role(role: str) -> Manifest:
    text = sample.TOML.format(runtime="python3", resources="", filesystem="read-only-package", more="")
    return parse.parse(text.replace('entry = "main.py"', f'entry = "main.py"\nrole = "{role}"').encode())


def _under_a_parent() -> Case:
    above = sample.manifest(
        network="full",
        more=FILES + sample.entries(("*.example.org", "[80]", "tcp"), ("10.1.0.0/16", '["5000-6000"]', "tcp")),
        resources="memory_mb = 64\nnet_bps = 1000",
    )
    ceiling = nine.requested(above, roles=data.roles()).for_child(remaining_seconds=60)
    wanted = sample.manifest(network="full", more=FILES + SUPERVISED + sample.entries(*DESTINATIONS))
    return case(wanted, ceiling=ceiling)


_LIMITS = (
    "memory_mb = 100\ndisk_mb = 7\npids_max = 9\ncpu_millis = 250\ncpu_weight = 37\nswap_mb = 8\ncpu_time_ms = 5000"
)
_IO = "io_read_bps = 1000000\nio_write_iops = 200\nnet_bps = 125000"
# One of each kind of policy that there is.
CASES: dict[str, Callable[[], Case]] = {
    "least": lambda: case(sample.manifest(filesystem="read-only-package")),
    "much": lambda: case(sample.manifest(more=FILES + PROGRAMS, resources=_LIMITS)),
    "aarch64": lambda: case(sample.manifest(more='[permissions.syscalls]\nallow = ["time"]'), host(arch="aarch64")),
    "node": lambda: case(sample.manifest(runtime="node")),
    "program": lambda: case(sample.manifest(runtime="rust-bin")),
    "writes": lambda: case(
        sample.manifest(
            filesystem="host", more='[permissions.filesystem]\nread = ["/opt/file"]\nwrite = ["/srv/data"]\n'
        )
    ),
    "empty host": lambda: case(sample.manifest(filesystem="host", more=FILES)),
    "role": lambda: case(_with_role("observer")),
    "idle rate": lambda: case(sample.manifest(resources="net_bps = 5")),
    "https": lambda: case(sample.manifest(network="outbound-https-only")),
    "full": lambda: case(sample.manifest(network="full", resources="net_bps = 1")),
    "highest rate": lambda: case(sample.manifest(network="full", resources="net_bps = 1000000000000")),
    "network": lambda: case(sample.manifest(network="full", more=sample.entries(*DESTINATIONS))),
    "rest": lambda: case(
        sample.manifest(network="full", more=SUPERVISED + sample.entries(*DESTINATIONS), resources=_IO)
    ),
    "secret files": lambda: case(
        sample.manifest(more='[permissions.credentials]\ngrants = ["db"]\nfiles = true\n', filesystem="ephemeral")
    ),
    "host stack": lambda: case(
        sample.manifest(network="full", more=sample.entries(*DESTINATIONS)), host(network=NetworkFacts("", "", "host"))
    ),
    "child": _under_a_parent,
}

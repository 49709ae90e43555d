#!/usr/bin/env python3
"""Delegation down a chain of 64 agents with 1,000 grants each, beside a bare sorted merge of the same tuples.

.venv/bin/python benchmarks/delegate.py [runs]

A level is what a spawn asks of the lattice: the parent's ceiling, the meet with what the child asks for, and what was
taken. The bare merge intersects the sorted (domain, text) tuples of both manifests with two indices. The growth is
shown from 250 to 4,000 grants a manifest, over n log n.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy.grants.credentials import CredentialSet
from policy.grants.effective import Effective
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants
from policy.grants.resources import UNITS, Ceilings
from policy.grants.sets.domain import NameSet
from policy.grants.skills import SkillSet
from policy.grants.spawning import Spawning
from policy.grants.syscalls import SyscallSet
from policy.rules.parent import Ancestor, Drawn, Parent, delegate

Tuples = tuple[tuple[str, str], ...]
DEPTH = 64


def grants(count: int, level: int) -> tuple[Effective, Tuples]:
    """A manifest of ``count`` grants, and the same as sorted tuples. Each level lacks two grants of a domain."""
    share = count // 8
    kept = [i for i in range(share) if i % DEPTH != level % DEPTH or i < 8]
    paths = [f"/srv/d{i % 16}/e{i}" for i in kept]
    writes = [f"/var/tmp/w{i}/x" for i in kept]
    # Every eighth name is a wildcard above others, so that nesting is paid for.
    hosts = [f"*.z{i % 32}.example.org" if i % 8 == 0 else f"h{i}.z{i % 32}.example.org" for i in kept]
    names = [(host, [(443, 443), (8000, 8000 + i % 9)], "tls") for i, host in zip(kept, hosts, strict=True)]
    blocks = [(f"10.{i // 256}.{i % 256}.0/24", [(5432, 5432)], "tcp") for i in kept]
    programs = [(f"/usr/bin/p{i}", f"{i:064x}") for i in kept]
    secrets = [f"secret-{i}" for i in kept]
    tools = [f"matrix://tool/mcp/s{i % 9}/t{i}@1.0" for i in kept]
    calls = [f"call_{i}" for i in kept]
    effective = Effective(
        identity=Identity.top(),
        filesystem=FilesystemGrants.of("host", paths, writes),
        network=Network.of([*names, *blocks]),  # type: ignore[list-item]
        syscalls=SyscallSet.of(calls),
        executables=ExecutableSet.of(programs),
        resources=Ceilings(*(10_000 - level for _ in UNITS)),
        credentials=CredentialSet.of(secrets),
        skills=SkillSet(NameSet.of(tools), NameSet.of(("read",))),
        spawning=Spawning(DEPTH, 100),
        lifetime=LifetimeGrant(100_000 - level),
    )
    listed = [("read", p) for p in paths] + [("write", p) for p in writes]
    listed += [("name", str(n)) for n in names] + [("block", str(b)) for b in blocks]
    listed += [("program", str(p)) for p in programs] + [("secret", s) for s in secrets]
    listed += [("tool", t) for t in tools] + [("call", c) for c in calls]
    return effective, tuple(sorted(listed))


def chain(manifests: Sequence[Effective]) -> Effective:
    """The effective grants at the end of the chain."""
    mine = manifests[0]
    for depth, child in enumerate(manifests[1:]):
        ancestor = Ancestor("run", "agent", depth, mine.spawning, 0)
        parent = Parent("run", "agent", "0" * 64, mine, mine.lifetime.ttl_seconds, Drawn(), (ancestor,))
        mine = delegate(parent, child).granted
    return mine


def merged(lists: Sequence[Tuples]) -> Tuples:
    """The same by bare merges."""
    mine = lists[0]
    for theirs in lists[1:]:
        out = []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            if mine[i] == theirs[j]:
                out.append(mine[i])
                i += 1
                j += 1
            elif mine[i] < theirs[j]:
                i += 1
            else:
                j += 1
        mine = tuple(out)
    return mine


def milliseconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1000


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"depth {DEPTH}; milliseconds for the whole chain, medians of {runs} pairs")
    first = 0.0
    for count in (250, 500, 1000, 2000, 4000):
        made = [grants(count, level) for level in range(DEPTH)]
        manifests, lists = [m for m, _ in made], [t for _, t in made]
        pairs = [
            (milliseconds(lambda: chain(manifests)), milliseconds(lambda: merged(lists)))  # noqa: B023 - called here
            for _ in range(runs)
        ]
        ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        unit = ours / (count * math.log2(count))
        first = first or unit
        print(
            f"{count:5} grants: delegate {ours:8.1f} ms, merge {bare:7.1f} ms, ratio {ratio:5.1f};"
            f" per n log n {unit / first:5.2f} of the first"
        )


if __name__ == "__main__":
    main()

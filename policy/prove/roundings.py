"""Roundings of grants by coarser enforcers: the one table of tolerances, and the rules that apply it.

A rule takes the effective grants of a domain and says what artefacts that hold them must read back as, with the ids of
the roundings that made a difference. The comparison that follows is for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct, structs

from policy import data, symlinks
from policy.decompile.network import network, reach
from policy.decompile.read import Decompiled
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.paths import PathSet
from policy.grants.resources import Ceilings
from policy.grants.syscalls import SyscallSet


class Rounding(Struct, frozen=True):
    """Where an enforcer cannot hold a grant to the letter: the domain, and what it holds instead."""

    domain: str
    holds: str


# Everything in which decompiled and effective grants may differ. A difference that is not here fails the proof.
ROUNDINGS: Final[Mapping[str, Rounding]] = {
    "empty-host": Rounding("filesystem", "mode host without a writable path is mode ephemeral"),
    "link": Rounding("filesystem", "a granted path that leads through links of the host is what they lead to"),
    "name-is-address": Rounding(
        "network", "a name has, beside its own ports, those that every public address has: rules cannot tell them apart"
    ),
    "neighbours": Rounding("network", "the gateway answers the neighbour discovery of IPv6, and nothing else of ICMP"),
    "arch-lacks": Rounding("syscalls", "a granted call that this machine does not have is not in its filter"),
    "arguments": Rounding("syscalls", "a granted call passes with the arguments of policy/data/arguments.toml alone"),
    "enosys": Rounding(
        "syscalls", "clone3, which is never granted, answers ENOSYS and not EPERM beside clone (docs/adr/0006)"
    ),
    "pinned": Rounding(
        "executables", "a program granted by its path alone is bound to the content it had when compiled"
    ),
    "runtime-again": Rounding(
        "executables",
        "beside a granted program the runtime of the agent (docs/adr/0010) and its init (docs/adr/0072) can be started",
    ),
    "memory-overhead": Rounding(
        "resources", "the cgroup's memory is memory_mb, the scratch tmpfs and the sandbox's own 64 MiB + pids_max / 2"
    ),
    "pids-wall": Rounding("resources", "pids_max is RLIMIT_NPROC; the cgroup holds 2 x pids_max + 64 host tasks"),
    "shares": Rounding("resources", "cpu_weight is cpu.shares of version 1, 1024 for 100, rounded down"),
    "io-device": Rounding("resources", "io ceilings hold for one device, and on version 2 of cgroups alone"),
    "file-size": Rounding("resources", "disk_mb without a scratch is only the largest size of a file"),
    "highest-rate": Rounding(
        "resources", "net_bps above 18 GB a second is held to that, the most that the kernel takes"
    ),
    "no-network-rate": Rounding("resources", "net_bps without a network is written down and holds nothing"),
}
# Never granted (it stands on the deny list), and answered with ENOSYS where the second is granted, so that a libc
# falls back to it.
ENOSYS: Final[Mapping[str, str]] = {"clone3": "clone"}

_IO: Final = ("io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops")

Expected = tuple[Any, tuple[str, ...]]


def expected(effective: Effective, found: Decompiled) -> dict[str, Expected]:
    """By domain: what the grants must read back as, and the ids of the roundings that apply."""
    return {
        name: _RULES[name](effective, found) if name in _RULES else (getattr(effective, name), ()) for name in DOMAINS
    }


def _filesystem(effective: Effective, found: Decompiled) -> Expected:
    mine, links = effective.filesystem, found.seen.links
    used: tuple[str, ...] = ()
    if mine.mode == "host" and not mine.write and not mine.volumes.listing():
        mine, used = replace(mine, mode="ephemeral"), ("empty-host",)
    real = {path: symlinks.follow(path, links) or path for path in mine.read}
    if all(path == place for path, place in real.items()):
        return mine, used
    # A link to a file that the root has anyway has no mount (policy.prove.facts).
    there = found.grants.filesystem.readable()
    left = (place for path, place in real.items() if path == place or there.covers(place))
    return replace(mine, read=PathSet.of(left)), (*used, "link")


def _network(effective: Effective, found: Decompiled) -> Expected:
    mine = effective.network
    joined = reach.with_common(mine)
    used = ("neighbours",) if effective.linked else ()
    return joined, used if joined == mine else ("name-is-address", *used)


def _syscalls(effective: Effective, found: Decompiled) -> Expected:
    known = frozenset(data.syscalls(found.arch).numbers)
    names = known if effective.syscalls.any else effective.syscalls.names
    lacking = ("arch-lacks",) if names - known else ()
    absent = ("enosys",) if missing(names) else ()
    return SyscallSet(names & known), ("arguments", *absent, *lacking)


def missing(names: frozenset[str]) -> frozenset[str]:
    """The calls that answer ENOSYS where these are granted."""
    return frozenset(call for call, instead in ENOSYS.items() if instead in names)


def _executables(effective: Effective, found: Decompiled) -> Expected:
    mine = effective.executables
    content = {file.path: file for file in found.grants.executables}
    bound = tuple(file if file.sha256 else content.get(file.path, file) for file in mine)
    used = (("pinned", any(not file.sha256 for file in mine)), ("runtime-again", bool(mine)))
    return ExecutableSet(bound, mine.any, mine.trees), tuple(name for name, applies in used if applies)


def _resources(effective: Effective, found: Decompiled) -> Expected:
    mine = effective.resources
    io = any(getattr(mine, name) for name in _IO)
    used = (
        ("memory-overhead", True),
        ("pids-wall", True),
        ("shares", not io),
        ("io-device", io),
        ("file-size", found.seen.scratch_mb is None),
        ("highest-rate", (mine.net_bps or 0) > network.MAX_RATE and effective.linked),
        ("no-network-rate", mine.net_bps is not None and not effective.linked),
    )
    return mine, tuple(name for name, applies in used if applies)


def of_holder(holder: str, resources: Ceilings) -> Ceilings:
    """The ceilings of one holder: the OCI configuration has no place for those of io."""
    return structs.replace(resources, **dict.fromkeys(_IO)) if holder == "oci" else resources


_RULES: Final[Mapping[str, Callable[[Effective, Decompiled], Expected]]] = {
    "filesystem": _filesystem,
    "network": _network,
    "syscalls": _syscalls,
    "executables": _executables,
    "resources": _resources,
}

"""Test the five denials again in every run, inside the interpreter before the agent's code, and await the reports.

A preloaded shared object (sandbox.probes.preload_object) tries to make a file, start a program, connect, resolve a name
and make a forbidden call. The tries are chosen from the artefacts as they read back. Inside, a try that is not refused
ends the process. Outside, the layer that refused a try must report it before the agent is given its intent: gVisor's
filter in its log, the gateway and its gates in their reports. These reports are the first of their kind in the run,
since no code of the agent has run yet. So each is taken once and is no denial of the agent's; the agent's own tries are
counted on top.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec import Struct

from policy import data, denials
from policy.compile.artefacts import Artefacts
from policy.decompile import read as reading
from policy.decompile.network import gates
from policy.host import Closure
from sandbox.audit.denials import PRELUDE_FILE
from sandbox.network import addresses
from sandbox.probes import denial_probes, preload_object
from sandbox.probes.preload_object import ProbeStep
from sandbox.probes.probe_program import Argument, Bytes, Call, Result
from sandbox.rootfs import closure_files

# Runtimes whose program is the distribution's and is loaded by its loader; another is the package's own.
RUNTIMES: Final = frozenset({"python3", "node"})
_AT_FDCWD, _O_CREATE = -100, 0o301  # O_WRONLY | O_CREAT | O_EXCL
_AF_INET, _STREAM, _DATAGRAM = 2, 1, 2
_EPERM, _MOST_ERRNO, _MOST = -1, -4095, 1 << 31
_DNS_HEAD, _ANSWER_BYTES = 12, 512
_NO_PROGRAM: Final = "/workspace/agent.toml"
# Refused by every filter (policy/data/deny.toml), and the last that is tried: once it is heard of, all were tried.
_LAST: Final = ("chroot", (Bytes(b"/\0"),))


class InProcessProbes(Struct, frozen=True):
    """Hold the tries of a run and the reports that must follow.

    ``object`` is the shared object that makes them. ``calls`` are the calls that the filter refuses, by number and in
    this order. ``told`` are the denials of the gateway and its gates.
    """

    object: bytes
    calls: tuple[int, ...]
    told: frozenset[denials.Denial]


@dataclass
class _Made:
    numbers: Mapping[str, int]
    allowed: Collection[str]
    inet: bool
    steps: list[ProbeStep] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    told: set[denials.Denial] = field(default_factory=set)

    def call(
        self, name: str, *arguments: Argument, least: int = _MOST_ERRNO, most: int = -1, refused: bool = False
    ) -> int:
        """One more call, which must give between ``least`` and ``most``; what the filter forbids gives EPERM.

        By ``refused`` it forbids these arguments alone.
        """
        if refused or name not in self.allowed:
            least = most = _EPERM
            self.calls.append(self.numbers[name])
        self.steps.append(ProbeStep(Call(self.numbers[name], arguments), least, most))
        return len(self.steps) - 1

    def socket(self, kind: int) -> int | None:
        """A socket, which is none where the filter forbids them, or has no other family than unix sockets."""
        place = self.call("socket", _AF_INET, kind, 0, least=0, most=_MOST, refused=not self.inet)
        return place if self.inet else None


def possible(runtime: str, arch: str) -> bool:
    """Whether a run of this runtime can be asked for it here."""
    return runtime in RUNTIMES and arch in preload_object.ARCHES


def tries(artefacts: Artefacts) -> InProcessProbes:
    """Choose the tries for these artefacts.

    Raises:
        errors.ArtefactError: Raised when they cannot be read back.
    """
    found = reading.read(artefacts.files)
    made = _Made(data.syscalls(found.arch).numbers, found.calls.allowed.keys(), denial_probes.makes_sockets(found))
    made.call("openat", _AT_FDCWD, Bytes(PRELUDE_FILE.encode() + b"\0"), _O_CREATE, 0o600)
    made.call("execve", Bytes(_NO_PROGRAM.encode() + b"\0"), 0, 0)
    if "execve" in made.allowed:
        # Not refused by the filter, and so told by its failure.
        made.told.add(denials.Denial("exec", _NO_PROGRAM, denials.NOT_GRANTED))
    networked = found.reached.linked
    port = gates.read(artefacts.files).dns_port if networked else None
    _name(made, networked, port, denial_probes.refused_name(found))
    _connection(made, denial_probes.refused_connection(found) if networked else None)
    last, arguments = _LAST
    made.call(last, *arguments)
    # An init starts the agent as its first child, before any other process exists.
    object_ = preload_object.build(found.args[0], made.steps, process=2 if found.init else 1)
    return InProcessProbes(object_, tuple(made.calls), frozenset(made.told))


def _connection(made: _Made, where: tuple[str, int] | None) -> None:
    socket = made.socket(_STREAM)
    if socket is None or where is None:
        return
    address, port = where
    made.call("connect", Result(socket), Bytes(denial_probes.address(address, port)), 16)
    made.call("close", Result(socket), least=0, most=0)
    made.told.add(denial_probes.told_of_connection(address, port))


def _name(made: _Made, networked: bool, port: int | None, name: str | None) -> None:
    if networked and (port is None or name is None):
        return
    socket = made.socket(_DATAGRAM)
    if socket is None or port is None or name is None:
        return
    query = denial_probes.query(name)
    made.call("connect", Result(socket), Bytes(denial_probes.address(addresses.GATEWAY4, port)), 16, least=0, most=0)
    made.call("write", Result(socket), Bytes(query), len(query), least=len(query), most=len(query))
    # Wait for the answer: before it comes the gate has refused nothing.
    made.call("read", Result(socket), Bytes(bytes(_ANSWER_BYTES)), _ANSWER_BYTES, least=_DNS_HEAD, most=_ANSWER_BYTES)
    made.call("close", Result(socket), least=0, most=0)
    made.told.add(denial_probes.told_of_name(name))


@functools.lru_cache(maxsize=16)
def closure(directory: Path, program: bytes) -> Closure:
    """The object and the list that names it as one more closure of a root directory; both lie in ``directory``."""
    files = {preload_object.LIST: preload_object.PATH.encode() + b"\n", preload_object.PATH: program}
    return closure_files.derived(directory, "prelude", files, entry=preload_object.PATH)


class ProbeReports:
    """Track the reports that are still missing in one run. Each reporter of denials passes them here first."""

    def __init__(self, tries: InProcessProbes, denied: denials.Told) -> None:
        self.calls = deque(tries.calls)
        self._told, self._denied = set(tries.told), denied
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        """Pass on what is not one of the tries."""
        if count := self._taken(denial, count):
            self._denied(denial, count=count)

    def quietly(self, denial: denials.Denial, *, count: int = 1) -> None:
        """Pass on nothing, for what an operator will not have told."""
        self._taken(denial, count)

    def _taken(self, denial: denials.Denial, count: int) -> int:
        if denial not in self._told:
            return count
        self._told.discard(denial)
        os.eventfd_write(self._event, 1)
        return count - 1

    def fileno(self) -> int:
        """Readable once one of the denials was told."""
        return self._event

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the reports that are still missing, in words."""
        return (*(f"the filter of call {call}" for call in self.calls), *(f"{d.layer} {d.target}" for d in self._told))

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._event)

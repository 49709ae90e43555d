"""Probes of forbidden acts: a connect, a name, a write, a program and a system call, each with its control.

The probes are chosen from the decompiled artefacts (policy.decompile), not from the intended grants. A denial counts
only if the call would have another result without the refusal. If the policy allows acts of the kind, a control must
succeed, otherwise the denials prove nothing. A connection may also fail outside; it counts as refused only if the
gateway itself reports the denial.
"""

from __future__ import annotations

import errno
import ipaddress
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from policy import data, denials, errors
from policy.compile.artefacts import Artefacts
from policy.decompile import conditions
from policy.decompile import read as reading
from policy.decompile.mounts import OWN_LIMITS
from policy.decompile.network import gates
from policy.decompile.read import Decompiled
from policy.grants.sets.access import Access
from sandbox.network import addresses
from sandbox.probes import probe_program
from sandbox.probes.probe_program import Argument, Bytes, Call, Result

_AT_FDCWD, _X_OK = -100, 1
_O_CREATE = 0o301  # O_WRONLY | O_CREAT | O_EXCL
_O_WRITE = 0o1
_AF_INET, _STREAM, _DATAGRAM = 2, 1, 2
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
# Calls that no policy needs, with arguments for which gVisor has another answer than EPERM.
_FORBIDDEN_CALLS: Final[tuple[tuple[str, tuple[Argument, ...]], ...]] = (
    ("unshare", (0,)),
    ("setns", (-1, 0)),
    ("personality", (0xFFFFFFFF,)),
    ("memfd_create", (0, 0)),
)
# Addresses that no policy grants by accident: the metadata service of clouds, a private one, one for documentation.
_FORBIDDEN_ADDRESSES: Final = (("169.254.169.254", 80), ("10.255.255.254", 9), ("192.0.2.1", 9))
_FORBIDDEN_NAMES: Final = ("covenant-canary.invalid", "covenant-canary.example")
# The errors without a network. With one the gateway answers each refused packet itself.
_NO_WAY: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM})
_REFUSED: Final = frozenset({errno.ECONNREFUSED})
_DNS_HEAD = struct.Struct(">HHHHHH")
_NXDOMAIN, _ANSWER_BYTES = 3, 512
_MAX_READ_PATHS = 4


class Probe(Struct, frozen=True):
    """One probe: the call by its place in the message, and the expected results.

    ``denied`` are the errnos of a refusal. It is empty for a control, which must return ``least`` or more. ``told`` is
    the denial that the refusing layer must have reported.
    """

    what: str
    call: int
    denied: Collection[int] = ()
    least: int = 0
    name: bool = False
    told: denials.Denial | None = None

    def fault(self, result: int, held: bytes, told: Collection[denials.Denial] = ()) -> str:
        """Return the difference from the expected result; empty if there is none."""
        if self.told is not None and self.told not in told:
            return f"{self.what}: {_said(result)}, and not refused by {denials.LAYERS[self.told.layer]}"
        if self.name:
            return "" if _not_there(held[: max(result, 0)]) else f"{self.what}: {_said(result)}, and no NXDOMAIN"
        if self.denied:
            return "" if -result in self.denied else f"{self.what}: {_said(result)}, and not refused"
        return "" if result >= self.least else f"control: {self.what}: {_said(result)}"


def _said(result: int) -> str:
    return errno.errorcode.get(-result, str(result)) if result < 0 else f"it gave {result}"


def _not_there(answer: bytes) -> bool:
    return len(answer) >= _DNS_HEAD.size and answer[3] & 0xF == _NXDOMAIN and answer[6:8] == b"\0\0"


@dataclass
class ProbePlan:
    """The calls of a self-test in their order, and the probes that judge them."""

    numbers: Mapping[str, int]
    allowed: Collection[str]
    calls: list[Call] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)

    def call(self, name: str, *arguments: Argument) -> int:
        """Add a call. Returns its place."""
        self.calls.append(Call(self.numbers[name], arguments))
        return len(self.calls) - 1

    def denial(self, what: str, call: int, *denied: int, told: denials.Denial | None = None) -> None:
        """Add a probe: the call must be refused."""
        self.probes.append(Probe(what, call, frozenset(denied), told=told))

    def control(self, what: str, call: int, *, least: int = 0) -> None:
        """Add a probe: the call must succeed."""
        self.probes.append(Probe(what, call, least=least))

    def message(self) -> bytes:
        """Return the message for the program.

        Raises:
            errors.ArtefactError: Raised when it is too long for the program, such as by paths of 1,000 characters.
        """
        try:
            return probe_program.message(self.calls)
        except ValueError as e:
            raise errors.ArtefactError(str(e)) from e

    def faults(self, answer: bytes, told: Collection[denials.Denial] = ()) -> tuple[str, ...]:
        """Return all differences from the policy, by the program's answer and the denials reported meanwhile."""
        found = probe_program.results(self.calls, answer)
        if found is None:
            return (
                f"the canary gave {len(answer)} bytes, no answer: a program was started in its place, or it was ended",
            )
        said = (probe.fault(*found[probe.call], told) for probe in self.probes)
        return tuple(fault for fault in said if fault)


def plan(artefacts: Artefacts) -> ProbePlan:
    """Choose the probes for these artefacts.

    Raises:
        errors.ArtefactError: Raised when they cannot be decompiled.
    """
    found = reading.read(artefacts.files)
    made = ProbePlan(data.syscalls(found.arch).numbers, found.calls.allowed.keys())
    _system_call(made)
    _programs(made, found)
    _files(made, found)
    if not found.reached.linked:
        _no_network(made, found)
    else:
        _network(made, found, gates.read(artefacts.files))
    return made


def _system_call(made: ProbePlan) -> None:
    for name, arguments in _FORBIDDEN_CALLS:
        if name not in made.allowed and name in made.numbers:
            made.denial(f"system call {name}", made.call(name, *arguments), errno.EPERM)
    for name in ("getpid", "gettid", "getppid"):
        if name in made.allowed:
            made.control(f"system call {name}", made.call(name))
            break


def _programs(made: ProbePlan, found: Decompiled) -> None:
    for name in ("execve", "execveat"):
        if name not in made.allowed:
            place = (Bytes(_text(probe_program.PATH)), 0, 0)
            at: tuple[Argument, ...] = (_AT_FDCWD, *place, 0) if name == "execveat" else place
            made.denial(f"start of a program by {name}", made.call(name, *at), errno.EPERM)
    if "execve" in made.allowed:
        # The file exists, is readable, and is never granted as a program.
        call = made.call("execve", Bytes(_text("/workspace/agent.toml")), 0, 0)
        made.denial("start of a file that is no granted program", call, errno.EACCES, errno.EPERM)
    for program in found.seen.programs[:1]:
        if "faccessat" in made.allowed:
            call = made.call("faccessat", _AT_FDCWD, Bytes(_text(program.entry)), _X_OK)
            made.control(f"program {program.entry} can be started", call)


def _files(made: ProbePlan, found: Decompiled) -> None:
    if "openat" not in made.allowed:
        made.denial("opening a file", _open(made, "/workspace/agent.toml", 0), errno.EPERM)
        return
    for folder in ("/", "/workspace/"):
        made.denial(f"a file made in {folder}", _open(made, f"{folder}.covenant-canary-file", _O_CREATE), *_READ_ONLY)
    read = [(path, kind) for path, kind in found.seen.granted.items() if path not in found.seen.rooms]
    for path, kind in read[:_MAX_READ_PATHS]:
        # A file is only opened, so that nothing is lost if that is not refused.
        flags = (f"{path}/.covenant-canary-file", _O_CREATE) if kind == "dir" else (path, _O_WRITE)
        made.denial(f"writing to {path}", _open(made, *flags), *_READ_ONLY)
    made.denial("writing to its own limits", _open(made, f"{OWN_LIMITS}/policy.json", _O_WRITE), *_READ_ONLY)
    made.control("its own limits are read", _open(made, f"{OWN_LIMITS}/policy.json", 0))
    made.denial("a file of the host", _open(made, "/etc/shadow", 0), errno.ENOENT)
    made.control("the package's manifest is read", _open(made, "/workspace/agent.toml", 0))
    if found.seen.scratch_mb is not None:
        made.control("a file is made in /tmp", _open(made, "/tmp/.covenant-canary-file", _O_CREATE))  # noqa: S108
    else:
        call = _open(made, "/tmp/.covenant-canary-file", _O_CREATE)  # noqa: S108
        made.denial("a file made in /tmp", call, *_READ_ONLY)


def _open(made: ProbePlan, path: str, flags: int) -> int:
    return made.call("openat", _AT_FDCWD, Bytes(_text(path)), flags, 0o600)


def makes_sockets(found: Decompiled) -> bool:
    """Whether the filter lets the agent make IPv4 sockets. Without a network a granted `socket` makes unix sockets."""
    condition = found.calls.condition("socket")
    return all(conditions.holds(condition, (_AF_INET, kind, 0, 0, 0, 0)) for kind in (_STREAM, _DATAGRAM))


def _no_network(made: ProbePlan, found: Decompiled) -> None:
    for what, kind in (("a connection", _STREAM), ("a lookup of a name", _DATAGRAM)):
        socket = made.call("socket", _AF_INET, kind, 0)
        if not makes_sockets(found):
            made.denial(what, socket, errno.EPERM)
        else:
            # The call is granted with this family; there is still no interface to send by.
            call = made.call("connect", Result(socket), Bytes(address(*_FORBIDDEN_ADDRESSES[0])), 16)
            made.denial(what, call, *_NO_WAY)


def _network(made: ProbePlan, found: Decompiled, gate: gates.Gates) -> None:
    if (where := refused_connection(found)) is not None:
        call = _connected(made, _STREAM, *where)
        told = told_of_connection(*where)
        made.denial(f"a connection to {where[0]}:{where[1]}", call, *_REFUSED, told=told)
    if gate.dns_port is None:
        return
    call = _connected(made, _STREAM, addresses.GATEWAY4, gate.dns_port)
    made.control("a connection to the DNS gate", call)
    if (name := refused_name(found)) is not None:
        asked = _asked(made, name, gate.dns_port)
        made.probes.append(Probe(f"name {name}", asked, name=True, told=told_of_name(name)))


def refused_connection(found: Decompiled) -> tuple[str, int] | None:
    """Return the first of our test addresses, with TCP port, that the policy does not grant."""
    reach = found.grants.network
    return next((one for one in _FORBIDDEN_ADDRESSES if _forbidden(reach.to_address(one[0]), one[1])), None)


def told_of_connection(address: str, port: int) -> denials.Denial:
    """Return the denial that the gateway reports for this connection."""
    return denials.Denial("packet", f"{address}:{port}/tcp", denials.NOT_GRANTED)


def refused_name(found: Decompiled) -> str | None:
    """Return the first of our test names that the policy does not grant, if any."""
    return next((name for name in _FORBIDDEN_NAMES if _forbidden(found.grants.network.to_name(name))), None)


def told_of_name(name: str) -> denials.Denial:
    """Return the denial that the DNS gate reports for this name."""
    return denials.Denial("dns", name, "name_not_granted")


def _forbidden(how: Access, port: int | None = None) -> bool:
    """Whether nothing is granted there, or nothing by TCP at this port."""
    return not how if port is None else not any(first <= port <= last for first, last in (*how.tcp, *how.tls))


def _connected(made: ProbePlan, kind: int, host: str, port: int) -> int:
    socket = made.call("socket", _AF_INET, kind, 0)
    return made.call("connect", Result(socket), Bytes(address(host, port)), 16)


def _asked(made: ProbePlan, name: str, port: int) -> int:
    """Add the calls of a query. Returns the place of the call that reads the gate's answer."""
    asked = query(name)
    socket = made.call("socket", _AF_INET, _DATAGRAM, 0)
    made.call("connect", Result(socket), Bytes(address(addresses.GATEWAY4, port)), 16)
    made.call("write", Result(socket), Bytes(asked), len(asked))
    return made.call("read", Result(socket), Bytes(bytes(_ANSWER_BYTES)), _ANSWER_BYTES)


def query(name: str) -> bytes:
    """The question for the IPv4 addresses of a name."""
    head = _DNS_HEAD.pack(0xC0DE, 0x0100, 1, 0, 0, 0)
    return head + b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0\0\1\0\1"


def address(host: str, port: int) -> bytes:
    """An IPv4 address and a port as the kernel takes them (struct sockaddr_in)."""
    return struct.pack("<H", _AF_INET) + struct.pack(">H", port) + ipaddress.IPv4Address(host).packed + bytes(8)


def _text(path: str) -> bytes:
    return path.encode() + b"\0"

"""Calls at the edges of the argument rules, each harmless wherever it is made, with what the filter has to say.

A descriptor is -1 or a null pointer stands where one is expected, so that what passes the filter fails in the kernel
with another error than EPERM, or changes nothing but the caller.
"""

from __future__ import annotations

import socket
import termios
from dataclasses import dataclass

from policy import data

BAD = 2**64 - 1
HIGH = 0xFFFFFFFF00000000
FLAGS = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
UNIX, INET, INET6, NETLINK, PACKET, VSOCK, ALG = 1, 2, 10, 16, 17, 40, 38
STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5
ADDR_NO_RANDOMIZE, READ_IMPLIES_EXEC = 0x0040000, 0x0400000
TIOCLINUX, TUNSETIFF = 0x541C, 0x400454CA


@dataclass(frozen=True)
class Probe:
    """One call; `allowed` without the network grant, `with_network` with it."""

    call: str
    arguments: tuple[int, ...]
    allowed: bool
    with_network: bool

    @property
    def id(self) -> str:
        """The call as strace would print it, roughly."""
        return f"{self.call}({', '.join(map(hex, self.arguments))})"

    def numbers(self, arch: str) -> list[int]:
        """Number and arguments."""
        return [data.syscalls(arch).numbers[self.call], *self.arguments]


def _always(call: str, *arguments: int) -> Probe:
    return Probe(call, arguments, True, True)


def _never(call: str, *arguments: int) -> Probe:
    return Probe(call, arguments, False, False)


def _network(call: str, *arguments: int) -> Probe:
    return Probe(call, arguments, False, True)


SOCKETS = (
    *(_always("socket", UNIX, kind | flags, 0) for kind in (STREAM, DGRAM, SEQPACKET) for flags in (0, FLAGS)),
    *(_network("socket", family, STREAM, protocol) for family in (INET, INET6) for protocol in (0, 6)),
    *(_network("socket", family, DGRAM | FLAGS, protocol) for family in (INET, INET6) for protocol in (0, 17)),
    *(_never("socket", family, RAW, 1) for family in (UNIX, INET, INET6)),
    *(_never("socket", family, kind, 0) for family in (NETLINK, PACKET) for kind in (RAW, DGRAM | FLAGS)),
    _never("socket", INET, DGRAM, 1),  # IPPROTO_ICMP: ping sockets
    _never("socket", INET, STREAM, 132),  # IPPROTO_SCTP
    _never("socket", INET, STREAM, 262),  # IPPROTO_MPTCP
    _never("socket", INET, 10, 0x0003),  # SOCK_PACKET
    _never("socket", ALG, SEQPACKET, 0),
    _never("socket", VSOCK, STREAM, 0),
    _never("socket", 0, STREAM, 0),
    _always("socketpair", UNIX, STREAM | FLAGS, 0, 0),
    _always("socketpair", UNIX, SEQPACKET, 0, 0),
    _never("socketpair", UNIX, RAW, 0, 0),
    _never("socketpair", INET, STREAM, 0, 0),
    _never("socketpair", 30, SEQPACKET, 0, 0),  # AF_TIPC
)
# The kernel takes 32 bits of these, so what stands above them is neither a way past the rule nor a reason to refuse.
UPPER_BITS = (
    _always("ioctl", BAD, termios.TCGETS | HIGH, 0),
    _never("ioctl", BAD, termios.TIOCSTI | HIGH, 0),
    _never("ioctl", BAD, TIOCLINUX | 1 << 32, 0),
    _always("socket", UNIX | 1 << 32, STREAM | HIGH, 0),
    _network("socket", INET | HIGH, STREAM | 1 << 40, 6 | 1 << 32),
    _never("socket", PACKET | 1 << 32, RAW, 0),
    _never("socket", UNIX | 1 << 33, RAW | HIGH, 0),
    _always("personality", 0xFFFFFFFF | HIGH),
    _never("personality", ADDR_NO_RANDOMIZE | HIGH),
    _always("prctl", 16 | HIGH, 0),
    _never("prctl", 22 | HIGH, 0),
)
OTHERS = (
    *(_always("ioctl", BAD, request, 0) for request in (termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD)),
    *(_always("ioctl", BAD, request, 0) for request in (termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX)),
    *(_never("ioctl", BAD, request, 0) for request in (termios.TIOCSTI, TIOCLINUX, termios.TIOCSETD, TUNSETIFF)),
    *(_never("ioctl", BAD, request, 0) for request in (termios.TCGETS - 1, termios.TCSETS, termios.TIOCSCTTY, 0, BAD)),
    _always("personality", 0xFFFFFFFF),
    *(_never("personality", value) for value in (1, ADDR_NO_RANDOMIZE, READ_IMPLIES_EXEC, 0x80000000, 0xFFFFFFFE)),
    _always("personality", 0),  # after the others, so that the caller ends as it began
    _always("prctl", 15, 0),
    _always("prctl", 16, 0),
    _always("prctl", 3),
    _always("prctl", 38, 1, 0, 0, 0),
    _always("prctl", 39, 0, 0, 0, 0),
    *(_never("prctl", option, BAD, BAD, BAD, BAD) for option in (2, 8, 22, 24, 35, 36, 47, 52, 53, 9999)),
    _never("prctl", 0x59616D61, BAD),  # PR_SET_PTRACER
    _never("prctl", 4, 2),
    _never("prctl", 4, 1 << 32),
    _never("prctl", 38, 0, 0, 0, 0),
    _always("seccomp", 1, 0, 0),
    _always("seccomp", 1, 1, 0),
    _always("seccomp", 2, 0, 0),
    *(_never("seccomp", 1, flags, 0) for flags in (4, 8, 9, 16)),
    _never("seccomp", 3, 0, 0),
    _never("seccomp", 99, 0, 0),
    _always("mknodat", BAD, 0, 0o010644, 0),
    _never("mknodat", BAD, 0, 0o020644, 0),
)
ONLY_X86_64 = (
    _always("arch_prctl", 0x1003, 0),
    *(_never("arch_prctl", option, BAD) for option in (0x1004, 0x1012, 0x1023, 0x3001, 0x5001, 9999)),
    _always("mknod", 0, 0o140644, 0),
    _never("mknod", 0, 0o060644, 0),
)


def probes(arch: str) -> tuple[Probe, ...]:
    """All of them, as far as `arch` has the calls."""
    return (*SOCKETS, *UPPER_BITS, *OTHERS, *(ONLY_X86_64 if arch == "x86_64" else ()))

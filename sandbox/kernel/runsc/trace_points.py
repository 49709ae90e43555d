"""Trace points of gVisor's kernel: which a session asks for, and what their messages say of files and programs.

A message is a header and a protobuf document (gvisor pkg/sentry/seccheck/points). Only the fields that are used here
are read. tests/kernel/test_learn.py fails with a runsc that sends other messages.
"""

from __future__ import annotations

import ipaddress
import posixpath
import socket
import struct
from collections.abc import Mapping, Sequence
from errno import EINPROGRESS
from typing import Any, Final

from policy.learn.observed import SeenAccess, access

HEADER: Final = struct.Struct("<HHI")
# pkg/sentry/seccheck/points/common.proto
CONTAINER_START, _CLONE, _EXEC, _OPEN, _CONNECT, _EXECVE = 1, 2, 3, 7, 10, 11
# Without `process_name`: the kernel cuts it after 15 bytes, within a character too, and runsc does not send a message
# with a text that is no UTF-8, nor counts it as dropped.
_CONTEXT: Final = ("time", "cwd", "group_id")
# The process that starts the agent's program (policy.compile.init).
_FIRST: Final = {1: "init"}
_CALLS: Final = ("open", "openat", "creat", "execve", "connect")
# The calls above whose directory has a descriptor.
_WITH_FD: Final = frozenset(("openat",))
# creat(2) has no flags: O_WRONLY, O_CREAT and O_TRUNC.
_CREAT_FLAGS: Final = 0o1101
_CREAT_NUMBERS: Final = frozenset((85,))
# The fields of a protobuf document by their numbers.
_Fields = dict[int, list[int | memoryview]]
_LARGEST_VARINT, _MASK = 10, 2**63 - 1


def points(calls: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the points of a session that sees files opened and programs started. ``calls`` are the machine's."""
    found: list[dict[str, Any]] = [
        {"name": f"sentry/{point}", "context_fields": list(_CONTEXT)} for point in ("execve", "clone")
    ]
    for call in _CALLS:
        if call in calls:
            point: dict[str, Any] = {"name": f"syscall/{call}/exit", "context_fields": list(_CONTEXT)}
            found.append({**point, "optional_fields": ["fd_path"]} if call in _WITH_FD else point)
    return found


class TraceReader:
    """Reads the messages of one container in their order. A process has the name of the program that it last called."""

    def __init__(self) -> None:
        self._names = dict(_FIRST)

    def parsed(self, message: bytes) -> SeenAccess | None:
        """Return what a message says. None for another message, and for one that cannot be read."""
        size, kind, _ = HEADER.unpack_from(message)
        if kind not in (_CLONE, _EXEC, _OPEN, _CONNECT, _EXECVE):
            return None
        try:
            return self._parsed(kind, _fields(memoryview(message)[size:]))
        except (IndexError, ValueError):
            return None

    def _parsed(self, kind: int, found: _Fields) -> SeenAccess | None:
        context = _fields(_bytes(found, 1))
        group, cwd, at_ns = _number(context, 4), _text(context, 8), _number(context, 1)
        by = self._names.get(group, "")
        if kind == _CLONE:
            self._names[_number(found, 3)] = by
            return None
        if kind == _EXEC:
            return access("load", _text(found, 2), cwd, by=by, at_ns=at_ns)
        errno = _number(_fields(_bytes(found, 2)), 2)
        folder = _text(found, 5) or cwd
        if kind == _CONNECT:
            target = _address(bytes(_bytes(found, 6)))
            # A connection that does not block is under way.
            ended_by = 0 if errno == EINPROGRESS else errno
            return SeenAccess("connect", target, by, at_ns, ended_by) if target else None
        path = _text(found, 6)
        if kind == _EXECVE:
            if not errno:
                self._names[group] = posixpath.basename(path)
            return access("exec", path, folder, by=by, at_ns=at_ns, errno=errno)
        flags = _CREAT_FLAGS if _number(found, 3) in _CREAT_NUMBERS else _number(found, 7)
        return access("open", path, folder, by=by, at_ns=at_ns, errno=errno, flags=flags)


def _address(raw: bytes) -> str:
    """Return an address of the internet as text with its port, empty for another family."""
    family = int.from_bytes(raw[:2], "little")
    if family == socket.AF_INET and len(raw) >= 8:
        return f"{ipaddress.IPv4Address(raw[4:8])}:{int.from_bytes(raw[2:4], 'big')}"
    if family == socket.AF_INET6 and len(raw) >= 24:
        return f"[{ipaddress.IPv6Address(raw[8:24])}]:{int.from_bytes(raw[2:4], 'big')}"
    return ""


def _fields(data: memoryview) -> _Fields:
    """Return the fields of a protobuf document by their numbers."""
    found: _Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | memoryview
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            raise ValueError("not a protobuf document")
        found.setdefault(number, []).append(value)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LARGEST_VARINT):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & _MASK, at + place + 1
    raise ValueError("a number of more than ten bytes")


def _last(found: Mapping[int, Sequence[int | memoryview]], number: int) -> int | memoryview | None:
    values = found.get(number)
    return values[-1] if values else None


def _bytes(found: Mapping[int, Sequence[int | memoryview]], number: int) -> memoryview:
    value = _last(found, number)
    return value if isinstance(value, memoryview) else memoryview(b"")


def _text(found: Mapping[int, Sequence[int | memoryview]], number: int) -> str:
    return bytes(_bytes(found, number)).decode("utf-8", "surrogateescape")


def _number(found: Mapping[int, Sequence[int | memoryview]], number: int) -> int:
    value = _last(found, number)
    return value if isinstance(value, int) else 0

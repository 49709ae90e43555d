"""Names that the DNS gate tells to the TLS gate: bounded, with an end, and nothing but addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from sandbox.network.gate import told_names
from sandbox.network.gate.told_names import ToldNames

V4, V6 = bytes([93, 184, 216, 34]), bytes.fromhex("26064700" + "0" * 20 + "1111")


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    tells, names = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tells, names:
        names.setblocking(False)
        tells.setblocking(False)
        yield tells, names


def test_name_has_both_families_until_their_end(line: tuple[socket.socket, socket.socket]) -> None:
    tells, names = line
    told = ToldNames(names)
    tells.send(told_names.message("a.example", [V4], 60))
    tells.send(told_names.message("a.example", [V6], 30))
    assert told.of("a.example", 0) == ["2606:4700::1111", "93.184.216.34"]
    assert told.of("a.example", 31) == ["93.184.216.34"]
    assert told.of("a.example", 61) == told.of("b.example", 0) == []
    tells.send(told_names.message("a.example", [bytes([9, 9, 9, 9])], 60))
    assert told.of("a.example", 0) == ["2606:4700::1111", "9.9.9.9"]


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        told_names.message("a.example", [V4], 60)[:-1],
        told_names.message("a.example", [V4], 60) + b"\x05",
        told_names.message("a.example", [V4[:3]], 60),
        told_names.message("a.example", [], 60),
        b"\0\0\0\x3c\xff" + b"a" * 20,
        b"\0\0\0\x3c\x01\xff\x04" + V4,
    ],
)
def test_other_bytes_are_passed_over(line: tuple[socket.socket, socket.socket], data: bytes) -> None:
    tells, names = line
    told = ToldNames(names)
    tells.send(data)
    tells.send(told_names.message("b.example", [V4], 60))
    assert told.of("a.example", 0) == []
    assert told.of("b.example", 0) == ["93.184.216.34"]


def test_oldest_names_make_room(line: tuple[socket.socket, socket.socket]) -> None:
    tells, names = line
    told = ToldNames(names)
    for index in range(2 * told_names.NAMES + 10):
        tells.send(told_names.message(f"n{index}.example", [V4], 60))
        told.take(0)
    assert told.of("n9.example", 0) == []
    assert told.of("n10.example", 0) == ["93.184.216.34"]


def test_end_of_dns_gate_is_end_of_line(line: tuple[socket.socket, socket.socket]) -> None:
    tells, names = line
    told = ToldNames(names)
    assert told.fileno() == names.fileno()
    os.close(tells.detach())
    told.take(0)
    assert told.fileno() == -1
    assert ToldNames(None).of("a.example", 0) == []

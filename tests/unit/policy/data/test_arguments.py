"""The rules over arguments as they ship, and how strictly their table is read."""

from __future__ import annotations

import copy
import fcntl
import re
import socket
import termios
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from policy import data, errors
from policy.data import argument_table

TABLE: dict[str, Any] = {
    "clone": {"reason": "why", "allow": [{"where": [[0, 0xF0, 0]], "reason": "threads"}]},
    "socket": {
        "reason": "why",
        "allow": [
            {"where": [[1, 0xFF, 1], [0, 0xFF, 1]], "reason": "unix"},
            {"where": [[0, 0xFF, 2]], "when": "network", "reason": "inet"},
        ],
    },
    "personality": {"reason": "why", "allow": [{"where": [[0, 0xFFFFFFFF, 0]], "reason": "plain"}]},
}
HOST: dict[str, Any] = {
    "rest": ["personality"],
    "refuse": {"ioctl": [{"where": [[1, 0xFFFFFFFF, 0x5412]], "reason": "TIOCSTI"}]},
}


def holds(call: str, *arguments: int, network: bool = False) -> bool:
    """The rule of `call` over these arguments, read as its table says it."""
    full = [*arguments, *(0,) * (6 - len(arguments))]
    alternatives = data.arguments().alternatives(call, network=network)
    assert alternatives is not None
    return any(all(full[c.argument] & c.mask == c.value for c in a.conditions) for a in alternatives)


def test_every_rule_is_about_call_that_can_be_granted() -> None:
    rules = data.arguments()
    assert rules.version >= 1
    for call in {*rules.rules, *rules.refused_on_host}:
        assert call in data.syscall_names() - data.deny().names
    assert rules.alternatives("read", network=True) is None


def test_each_rule_and_each_alternative_has_reason_and_masks_its_value() -> None:
    for call, rule in data.arguments().rules.items():
        assert (rule.call, bool(rule.reason), bool(rule.allow)) == (call, True, True)
        for alternative in rule.allow:
            assert alternative.reason
            arguments = [c.argument for c in alternative.conditions]
            assert arguments == sorted(set(arguments))


@pytest.mark.parametrize("flags", [0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC])
def test_sockets(flags: int) -> None:
    stream, datagram, packets, raw = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW
    for network in (False, True):
        for call in ("socket", "socketpair"):
            assert all(
                holds(call, socket.AF_UNIX, kind | flags, network=network) for kind in (stream, datagram, packets)
            )
            assert not holds(call, socket.AF_UNIX, raw | flags, network=network)
        for family in (socket.AF_INET, socket.AF_INET6):
            for kind, protocol in ((stream, 0), (stream, 6), (datagram, 0), (datagram, 17)):
                assert holds("socket", family, kind | flags, protocol, network=network) == network
                assert not holds("socketpair", family, kind | flags, protocol, network=network)
            for kind, protocol in ((raw, 1), (raw, 0), (datagram, 1), (datagram, 58), (stream, 132), (stream, 262)):
                assert not holds("socket", family, kind | flags, protocol, network=network)
        for other in set(range(64)) - {1, 2, 10}:
            assert not holds("socket", other, stream | flags, network=network)
            assert not holds("socket", other, raw | flags, network=network)


def test_requests_of_terminal() -> None:
    for request in (termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX):
        assert holds("ioctl", 0, request)
        assert holds("ioctl", 0, request | 0xFFFFFFFF00000000), "the kernel takes 32 bits"
    for request in (termios.TIOCSTI, 0x541C, termios.TIOCSETD, termios.TIOCCONS, 0x400454CA, 0):
        assert not holds("ioctl", 0, request)
        assert not holds("ioctl", 0, request | 0xFFFFFFFF00000000)
    refused = {a.conditions[0].value for a in data.arguments().refused_on_host["ioctl"]}
    assert refused == {termios.TIOCSTI, 0x541C, termios.TIOCSETD}
    assert fcntl.F_SETOWN, "left without a rule"
    assert data.arguments().alternatives("fcntl", network=False) is None


@pytest.mark.parametrize(("call", "arguments", "expected"), [
    ("personality", (0,), True), ("personality", (0xFFFFFFFF,), True), ("personality", (0x0040000,), False),
    ("personality", (0x80000000,), False), ("personality", (0x0400000,), False),
    ("prctl", (15, 1234), True), ("prctl", (4, 0), True), ("prctl", (4, 1), False), ("prctl", (22, 2), False),
    ("prctl", (38, 1), True), ("prctl", (38, 0), False), ("prctl", (38, 1 << 32 | 1), False), ("prctl", (24, 0), False),
    ("prctl", (52, 0), False), ("prctl", (0x59616D61, 1), False), ("prctl", (0x53564D41, 0), True),
    ("prctl", (0x53564D41, 1), False),
    ("arch_prctl", (0x1002, 1), True), ("arch_prctl", (0x1012, 0), False), ("arch_prctl", (0x1023, 18), False),
    ("seccomp", (1, 0), True), ("seccomp", (1, 1), True), ("seccomp", (1, 8), False), ("seccomp", (1, 4), False),
    ("seccomp", (0, 0), False), ("seccomp", (3, 0), False),
    ("clone", (0x003D0F00,), True), ("clone", (0x10000000,), False), ("mknod", (0, 0o010644), True),
    ("mknod", (0, 0o020644), False), ("mknodat", (0, 0, 0o060644), False), ("mknodat", (0, 0, 0o140644), True),
])  # fmt: skip
def test_other_rules(call: str, arguments: tuple[int, ...], expected: bool) -> None:
    assert holds(call, *arguments) == expected
    assert holds(call, *arguments, network=True) == expected


def test_every_namespace_flag_of_clone_is_bound() -> None:
    header = {"NEWNS": 17, "NEWCGROUP": 25, "NEWUTS": 26, "NEWIPC": 27, "NEWUSER": 28, "NEWPID": 29, "NEWNET": 30}
    for bit in range(32):
        assert holds("clone", 1 << bit) == (bit not in header.values())


# --- the table's form ---------------------------------------------------------------------------------


def test_table_becomes_rules() -> None:
    rules = argument_table.read(3, TABLE, HOST)
    assert (rules.version, list(rules.rules), rules.rest_on_host) == (
        3,
        ["clone", "personality", "socket"],
        ("personality",),
    )
    bare, with_network = (rules.alternatives("socket", network=network) for network in (False, True))
    assert bare is not None
    assert with_network is not None
    assert [c.argument for c in bare[0].conditions] == [0, 1]
    assert (len(bare), len(with_network), with_network[1].when) == (1, 2, "network")
    with pytest.raises(TypeError):
        rules.rules["x"] = rules.rules["clone"]  # type: ignore[index]


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(tables: dict[str, Any]) -> None:
        place = tables
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


@pytest.mark.parametrize(("change", "message"), [
    (put([], "calls", "clone", "allow"), "clone: no list of alternatives"),
    (put("x", "calls", "clone"), "clone: not exactly the keys"),
    (put(" ", "calls", "clone", "reason"), "clone: a reason is empty"),
    (put(3, "calls", "clone", "reason"), "clone: `reason` is no str"),
    (put(1, "calls", "clone", "deny"), "clone: not exactly the keys"),
    (put("", "calls", "clone", "allow", 0, "reason"), "clone: a reason is empty"),
    (put([], "calls", "clone", "allow", 0, "where"), "no condition, or two on one argument"),
    (put([[0, 1, 0], [0, 2, 0]], "calls", "clone", "allow", 0, "where"), "no condition, or two on one argument"),
    (put([[0, 1]], "calls", "clone", "allow", 0, "where"), "no [argument, mask, value]"),
    (put([[0, True, 0]], "calls", "clone", "allow", 0, "where"), "no [argument, mask, value]"),
    (put([[6, 1, 0]], "calls", "clone", "allow", 0, "where"), "can never or always hold"),
    (put([[-1, 1, 0]], "calls", "clone", "allow", 0, "where"), "can never or always hold"),
    (put([[0, 0, 0]], "calls", "clone", "allow", 0, "where"), "can never or always hold"),
    (put([[0, 1, 2]], "calls", "clone", "allow", 0, "where"), "can never or always hold"),
    (put([[0, 1, -1]], "calls", "clone", "allow", 0, "where"), "can never or always hold"),
    (put([[0, 2**64, 0]], "calls", "clone", "allow", 0, "where"), "can never or always hold"),
    (put("moon", "calls", "socket", "allow", 1, "when"), "nothing can hang on `moon`"),
    (put(1, "calls", "socket", "allow", 1, "when"), "`when` is no str"),
    (put([[1, 0xFF, 1], [0, 0xFF, 1]], "calls", "socket", "allow", 1, "where"), "stands there twice"),
    (put("network", "host", "refuse", "ioctl", 0, "when"), "nothing can hang on `network`"),
    (put([[0, 1, 0], [1, 1, 0]], "host", "refuse", "ioctl", 0, "where"), "more than one condition"),
    (put(["socket"], "host", "rest"), "no list of values under one mask"),
    (put("network", "calls", "personality", "allow", 0, "when"), "`personality` is no list of values under one mask"),
    (put([{"where": [[0, m, 0]], "reason": "x"} for m in (1, 2)], "calls", "personality", "allow"), "under one mask"),
    (put(["read"], "host", "rest"), "`read` has no rule"),
    (put(["personality"] * 2, "host", "rest"), "stands there twice"),
    (put(HOST["refuse"]["ioctl"], "host", "refuse", "personality"), "`personality` stands in both tables"),
    (put({}, "host", "more"), "host: not exactly the keys"),
])  # fmt: skip
def test_table_is_read_strictly(change: Callable[[dict[str, Any]], None], message: str) -> None:
    tables = copy.deepcopy({"calls": TABLE, "host": HOST})
    change(tables)
    with pytest.raises(argument_table.ArgumentTableError, match=re.escape(message)):
        argument_table.read(1, tables["calls"], tables["host"])


@pytest.mark.parametrize("call", ["raed", "stime"])
def test_rule_for_no_call_is_damaged_installation(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"version": 1, "calls": {**TABLE, call: TABLE["clone"]}, "host": HOST}
    data.syscall_names()  # read from the real tables, before there is only one
    monkeypatch.setattr(data, "load", lambda path, keys: tables if path == "arguments.toml" else None)
    with pytest.raises(errors.InstallationError, match=f"`{call}` is no system call"):
        data.arguments.__wrapped__()


def test_malformed_rule_is_damaged_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda path, keys: {"version": 1, "calls": {"clone": {}}, "host": HOST})
    with pytest.raises(errors.InstallationError, match=re.escape("arguments.toml: clone: not exactly")):
        data.arguments.__wrapped__()


def test_rules_are_read_once_and_lie_in_package() -> None:
    assert data.arguments() is data.arguments()
    assert resources.files("policy.data").joinpath("arguments.toml").is_file()

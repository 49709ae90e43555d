"""Clients cannot fill the daemon's own log."""

from __future__ import annotations

import contextlib
import pathlib
import re
import socket
import struct

from covenant import daemon_log
from tests.daemon.test_lifecycle import Process, process

MALFORMED = b"GET / HTTP/1.1\r\nHost: a b\x00c\r\n\r\n"
FLOOD = 400


def http_port(one: Process) -> int:
    """The port that the daemon's first lines name."""
    assert one.popen.stderr is not None
    for line in one.popen.stderr:
        if found := re.search(r"HTTP 127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise AssertionError("the daemon named no port")


def sent(address: tuple[str, int] | str, data: bytes) -> bytes:
    """Return the answer to these bytes, up to the end of the connection."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(30)
        sock.connect(address)
        sock.sendall(data)
        if isinstance(address, str):
            sock.shutdown(socket.SHUT_WR)  # a frame that is cut off
        return b"".join(iter(lambda: sock.recv(4096), b""))
    return b""


def test_bad_heads_write_few_lines_and_number(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    with process(covenant_home, clone) as one:
        port = http_port(one)
        for _ in range(FLOOD):
            assert sent(("127.0.0.1", port), MALFORMED).startswith(b"HTTP/1.0 400")
        status, said = one.end()
    assert status == 0, said
    heads = [line for line in said.splitlines() if ".heads: " in line]
    written = [line for line in heads if line.endswith("a request could not be read")]
    numbers = [int(found[1]) for line in heads if (found := re.search(r": (\d+) more of these in 60 s were not", line))]
    assert len(written) <= 2 * daemon_log.MOST  # the flood may lie across two minutes
    assert len(numbers) <= 2
    assert len(written) + sum(numbers) == FLOOD
    assert "ends: SIGTERM" in said


def test_one_bad_head_writes_its_line(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    with process(covenant_home, clone) as one:
        port = http_port(one)
        sent(("127.0.0.1", port), MALFORMED)
        _, said = one.end()
    assert said.count("a request could not be read") == 1
    assert "were not written" not in said


def test_bad_frames_and_tokens_write_no_line(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    """They are rows of the audit log, which has a bound of its own."""
    wrong = b'{"kind": "authenticate", "token_b58": "wrong"}'
    frames = (b"\xff" * 64, struct.pack(">I", len(wrong)) + wrong, struct.pack(">I", 4) + b"null", b"\0\0")
    request = b"GET /tools HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer x\r\nConnection: close\r\n\r\n"
    with process(covenant_home, clone) as one:
        port = http_port(one)
        for _ in range(25):
            for data in frames:
                sent(str(covenant_home / "sock"), data)
            sent(("127.0.0.1", port), request % port)
        _, said = one.end()
    assert [line for line in said.splitlines() if "ends: SIGTERM" not in line] == []

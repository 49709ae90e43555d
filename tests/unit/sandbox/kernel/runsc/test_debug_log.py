"""Check the pipe of gVisor's log: each turn reads a bounded part of a flood, and nothing is lost at the end."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sandbox.kernel.runsc.debug_log import Failed, RefusedCalls

TIME = b'"level":"debug","time":"2026-11-27T08:55:13.496585231Z"}\n'
LINE = b'{"msg":"task_syscall.go:145] [   1:   1] Syscall %d: denied by seccomp",' + TIME


def opened(tmp_path: Path) -> tuple[RefusedCalls, list[tuple[str, int]], Callable[[bytes], None]]:
    """Make a reader, its list of reports, and a writer in gVisor's place."""
    told: list[tuple[str, int]] = []
    calls = RefusedCalls(tmp_path, {59: "execve"}, lambda name, count: told.append((name, count)))

    def write(data: bytes) -> None:
        fd = os.open(tmp_path / "sentry.log", os.O_WRONLY | os.O_NONBLOCK)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)

    return calls, told, write


def test_flood_of_different_calls_is_told_in_parts_and_counted_exactly(tmp_path: Path) -> None:
    calls, told, write = opened(tmp_path)
    write(b"".join(LINE % (number % 1000) for number in range(3000)))
    looks = 0
    while sum(count for _, count in told) < 3000:
        before = len(told)
        calls.ready()
        assert len(told) - before <= 64
        looks += 1
        assert looks < 100
    assert looks > 1000 // 64
    assert sum(count for name, count in told if name == "execve") == 3
    calls.close()
    assert sum(count for _, count in told) == 3000


def test_what_is_in_pipe_at_end_is_told(tmp_path: Path) -> None:
    calls, told, write = opened(tmp_path)
    write(b"".join(LINE % (number % 500) for number in range(8000)))
    calls.close()
    assert sum(count for _, count in told) == 8000
    assert len(told) == 500


def test_line_in_two_parts_is_one_and_no_line_of_another_is_any(tmp_path: Path) -> None:
    calls, told, write = opened(tmp_path)
    write((LINE % 59)[:40])
    calls.ready()
    write((LINE % 59)[40:] + b"x" * 70000 + b"\n] Syscall 59: denied by seccomp, it says\n" + LINE[1:] % 41)
    calls.ready()
    calls.close()
    assert told == [("execve", 1)]


def test_what_is_awaited_is_taken_once_and_in_its_order(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    awaited = deque([59, 41, 41, 161])
    calls = RefusedCalls(tmp_path, {}, lambda name, count: told.append((name, count)), awaited=awaited)
    fd = os.open(tmp_path / "sentry.log", os.O_WRONLY | os.O_NONBLOCK)
    for number in (41, 59, 41, 309, 41, 161, 161, 59):
        os.write(fd, LINE % number)
    os.close(fd)
    calls.ready()
    assert not awaited
    calls.close()
    # The first 41 came before its turn, and calls after the last awaited one belong to another caller.
    assert dict(told) == {"#41": 1, "#309": 1, "#161": 1, "#59": 1}


def _traced(call: str, path: str) -> bytes:
    message = f'strace.go:605] [   1:   1] python3 X {call}(0x7e {path}, 0x7e ["x"]) = 0 (0x0) errno=13 (refused) (3us)'
    return b'{"msg":' + json.dumps(message, ensure_ascii=False).encode() + b"," + TIME


def test_path_begins_no_line_of_its_own(tmp_path: Path) -> None:
    failed: list[tuple[Failed, int]] = []
    told: list[tuple[str, int]] = []
    calls = RefusedCalls(
        tmp_path,
        {59: "execve"},
        lambda name, count: told.append((name, count)),
        failed=lambda one, count: failed.append((one, count)),
    )
    inner = _traced("execve", "/usr/bin/forged").decode() + (LINE % 59).decode()
    paths = ["/tmp/n\nl", "/tmp/q\n" + inner, '/tmp/a"b\\c', "/tmp/\u00fc \u2028"]
    fd = os.open(tmp_path / "sentry.log", os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, b"".join(_traced("execve", path) for path in paths))
    os.close(fd)
    calls.ready()
    calls.close()
    assert told == []
    assert [one for one, _ in failed] == [Failed("execve", f'0x7e {path}, 0x7e ["x"]', 13) for path in paths]

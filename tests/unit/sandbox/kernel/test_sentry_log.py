"""The sandbox's log in a pipe: refused calls are counted, however the lines are cut; everything else is thrown away."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import errors
from sandbox.kernel import sentry_log
from sandbox.kernel.sentry_log import RefusedCalls

LINE = b"D1122 06:45:38.462099   19581 task_syscall.go:241] [   1:   1] Syscall 121: denied by seccomp\n"
NOISE = b"D1122 06:45:38.1  1 x.go:1] [   1:   1] Notified of signal 10\n"


class Log:
    """A pipe with its reader, and what it told."""

    def __init__(self, directory: Path) -> None:
        self.told = Counter[str]()
        self.calls = RefusedCalls(directory, {121: "getpgid"}, self._tell)
        self.writer = os.open(sentry_log.flags(directory)["--debug-log"], os.O_WRONLY | os.O_NONBLOCK)

    def _tell(self, name: str, count: int) -> None:
        self.told[name] += count

    def says(self, data: bytes) -> Counter[str]:
        """What is told of these bytes."""
        os.write(self.writer, data)
        self.calls.ready()
        return self.told


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path)
    with contextlib.closing(made.calls):
        yield made
    os.close(made.writer)


def test_refused_calls_are_counted_and_the_rest_is_thrown_away(log: Log) -> None:
    assert log.says(NOISE * 100) == {}
    assert log.says(LINE * 3 + NOISE + LINE.replace(b"121", b"999")) == {"getpgid": 3, "#999": 1}


@pytest.mark.parametrize("at", range(0, len(LINE), 7))
def test_a_line_that_comes_in_two_parts_is_one(log: Log, at: int) -> None:
    assert log.says(NOISE + LINE[:at]) == {}
    assert log.says(LINE[at:]) == {"getpgid": 1}


@pytest.mark.parametrize(
    "line",
    [b"Syscall 121: denied by seccomp\n", LINE[:-1] + b" today\n", LINE.replace(b"121", b"12345"),
     LINE.replace(b"121", b"-1"), b"x" * 100_000 + b"\n"],
)  # fmt: skip
def test_what_only_looks_like_it_is_none(log: Log, line: bytes) -> None:
    assert log.says(line) == {}
    assert log.says(LINE) == {"getpgid": 1}


def test_what_no_turn_takes_is_taken_by_the_next(log: Log) -> None:
    data = LINE * 5000
    assert len(data) > 256 * 1024
    sent = 0
    while sent < len(data):
        sent += os.write(log.writer, data[sent : sent + 60_000])
        log.calls.ready()
    assert log.told == {"getpgid": 5000}


def test_the_last_lines_are_told_at_the_end(tmp_path: Path) -> None:
    made = Log(tmp_path)
    os.write(made.writer, LINE)
    made.calls.close()
    os.close(made.writer)
    assert made.told == {"getpgid": 1}


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.KernelError, match="cannot be read"):
        RefusedCalls(tmp_path / "none", {}, lambda name, count: None)


@given(st.lists(st.one_of(st.just(LINE), st.just(NOISE), st.binary(max_size=50)), max_size=30))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    directory = tmp_path_factory.mktemp("log")
    made = Log(directory)
    with contextlib.closing(made.calls):
        made.says(b"".join(parts))
    os.close(made.writer)
    assert set(made.told) <= {"getpgid", *(f"#{n}" for n in range(10_000))}

"""Check ``covenant top``: the tree, the columns, and the terminal output of successive refreshes."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

import pytest

from covenant.cli import common
from covenant.cli.run import top

HEADS = ["RUN", "STATE", "CPU%", "CPU", "MEMORY", "OF", "TASKS", "IN", "OUT", "DENIED", "AGENT"]


def run(run_id: str, agent_id: str, depth: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "run_id": run_id * 9,
        "agent_id": agent_id,
        "state": "Running",
        "depth": depth,
        "cpu_ms": 1500,
        "memory_bytes": 3 << 20,
        "memory_mb": 64,
        "processes": 7,
        "received_bytes": 12_345,
        "sent_bytes": 999,
        "denied": 2,
        **more,
    }


def test_what_each_uses_stands_below_whoever_started_it() -> None:
    runs = [run("a", "parent"), run("b", "child", 1), run("c", "grand\x1bchild", 2), run("d", "other")]
    total, heads, *lines = top.table(runs, {"a" * 9: 1000}, 2.0)
    assert total == "4 runs, 12M in all"
    assert heads.split() == HEADS
    # Half a second of one core in two seconds; a run without an earlier sample shows no percentage.
    assert lines[0].split() == ["aaaaaaaa", "Running", "25", "1.50s", "3072K", "64M", "7", "12K", "999B", "2", "parent"]
    assert lines[1].split()[2] == "-"
    column = heads.index("AGENT")
    assert [line[column:] for line in lines] == ["parent", "  child", "    grand\\x1bchild", "other"]


def test_what_nobody_counts_is_not_said_to_be_nothing() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("cpu_ms", "memory_bytes", "processes", "received_bytes", "sent_bytes"))
    _, _, line = top.table([run("a", "local", **nothing)], {"a" * 9: 0}, 1.0)
    assert line.split() == ["aaaaaaaa", "Running", "-", "-", "-", "64M", "-", "-", "-", "2", "local"]


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(0, "0B"), (9_999, "9999B"), (10_000, "9K"), (10 << 20, "10M"), (20 << 30, "20G"), (20 << 40, "20T")],
)
def test_sizes_are_short(number: int, wanted: str) -> None:
    assert top.short_size(number) == wanted


def test_terminal_is_shown_each_look_in_place_of_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, shown = iter([1000, 1250]), list[str]()
    clock = iter([0.0, 1.0, 1.5])
    monkeypatch.setattr(top, "looker", lambda: lambda: [run("a", "one", cpu_ms=next(looks))])
    monkeypatch.setattr(top, "not_ready", lambda: ["standby: `two` waits"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(common, "say", shown.append)

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert top.top.callback is not None
    top.top.callback(once=False, seconds=0.5, as_json=False)
    assert all(screen.startswith("\x1b[H\x1b[J1 runs, 3072K in all\n") for screen in shown)
    assert [screen.splitlines()[2].split()[2] for screen in shown] == ["-", "50"]
    assert all(len(line) <= 60 for screen in shown for line in screen.splitlines()[1:])
    assert [screen.splitlines()[3] for screen in shown] == ["standby: `two` waits"] * 2

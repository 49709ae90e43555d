"""Check requests to spawn: their form is closed, and their limits never give a child more than it asks for."""

from __future__ import annotations

import os
import time
import types
from collections.abc import Mapping
from typing import Any, cast

import pytest

from policy import errors
from policy.grants.effective import Effective
from policy.grants.paths import FilesystemGrants, PathSet
from sandbox.broker import children, spawn_request
from sandbox.broker.server import Broker

GOOD: dict[str, Any] = {"agent": "a", "text": "t"}
LONGEST = spawn_request.PATH_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"agent": "a"},
        {**GOOD, "agent": 1},
        {**GOOD, "agent": "a" * 129},
        {**GOOD, "text": None},
        {**GOOD, "text": "x" * (spawn_request.TEXT_BYTES + 1)},
        {**GOOD, "parent": "other"},
        {**GOOD, "package": "/etc"},
        {**GOOD, "on_excess": "allow"},
        {**GOOD, "timeout_ms": 0},
        {**GOOD, "timeout_ms": True},
        {**GOOD, "only": []},
        {**GOOD, "only": {"write": []}},
        {**GOOD, "only": {"memory_mb": "1"}},
        {**GOOD, "only": {"read": "/"}},
        {**GOOD, "only": {"read": ["/a"] * 257}},
        {**GOOD, "only": {"read": ["/" + "a" * LONGEST]}},
        {**GOOD, "only": {"read": ["/a", "/" + "é" * (LONGEST // 2)]}},
        {**GOOD, "only": {"read": ["/\ud800"]}},
    ],
)
def test_what_is_no_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`"):
        spawn_request.parse_request(fields)


def test_request_says_what_it_says() -> None:
    asked = spawn_request.parse_request({**GOOD, "on_excess": "narrow", "timeout_ms": 5})
    assert (asked.agent_id, asked.text, asked.on_excess, asked.timeout_ms, asked.only) == ("a", "t", "narrow", 5, None)


@pytest.mark.parametrize("path", ["/" + "a" * (LONGEST - 1), "/a" + "é" * (LONGEST // 2 - 1)])
def test_longest_path_is_taken(path: str) -> None:
    only = spawn_request.parse_request({**GOOD, "only": {"read": [path]}}).only
    assert only is not None
    assert only.filesystem.write.paths == (path,)


def test_texts_have_rate_in_bytes_of_log() -> None:
    """A refused text takes nothing from the next one's allowance, and unused allowance has an upper bound."""
    now, nothing = [1_000.0], cast("Any", None)
    child_manager = children.ChildManager(
        nothing, start=nothing, use=nothing, denied=nothing, used=nothing, grace_seconds=0, clock=lambda: now[0]
    )
    half = "\x01" * (children.LOGGED_BURST // 12 - 1)  # six bytes each in a row, and two quotes
    for _ in range(2):
        assert [child_manager._may_log(half) for _ in range(4)] == [True, True, False, False]
        assert child_manager._may_log("short")
        now[0] += children.LOGGED_BURST / children.LOGGED_PER_SECOND
    now[0] += 1_000_000
    assert [child_manager._may_log(half) for _ in range(3)] == [True, True, False]


def test_longest_text_is_taken_by_run_that_sent_none() -> None:
    assert 6 * spawn_request.TEXT_BYTES < children.LOGGED_BURST


def test_only_takes_and_never_gives() -> None:
    """Write access includes read access: a path that is left out has neither."""
    wishes = Effective.top()
    of = FilesystemGrants.of("host", ["/srv/a", "/srv/b"], ["/srv/b/out", "/srv/c"])
    for read, left in (
        (["/srv/a/x"], FilesystemGrants.of("host", ["/srv/a/x"], [])),
        (["/srv/b"], FilesystemGrants.of("host", ["/srv/b"], ["/srv/b/out"])),
        (["/"], of),
        ([], FilesystemGrants.of("host", [], [])),
        (["/etc"], FilesystemGrants.of("host", [], [])),
    ):
        only = spawn_request.parse_request({**GOOD, "only": {"read": read, "memory_mb": 5}}).only
        assert only is not None
        met = of.meet(only.filesystem)
        assert (met.read, met.write) == (left.read, left.write)
        assert only.resources.meet(wishes.resources).memory_mb == 5
    assert PathSet.top().paths == ("/",)


class Asked:
    """A call of an agent, and the answers to it."""

    def __init__(self) -> None:
        self.fields, self.told = GOOD, list[tuple[str, str]]()

    def refuse(self, code: str, message: str) -> None:
        self.told.append((code, ""))

    def failed(self, error: errors.CovenantError) -> None:
        self.told.append((error.code, error.hint))


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (errors.WrongStateError("it is suspended", hint="ask again"), ("wrong_state", "ask again")),
        (errors.ParentEndedError("it is being ended"), ("no_task", "")),
        (None, ("no_task", "")),  # it has no task yet
    ],
)
def test_who_is_suspended_is_told_that_it_may_ask_again(
    monkeypatch: pytest.MonkeyPatch, ending: errors.CovenantError | None, told: tuple[str, str]
) -> None:
    """The broker still reads requests that the agent sent before it was suspended."""
    nothing = cast("Any", None)
    child_manager = children.ChildManager(
        nothing, start=nothing, use=nothing, denied=nothing, used=nothing, grace_seconds=0, ending=lambda: ending
    )
    monkeypatch.setattr(child_manager, "_check", lambda: None)
    call = Asked()
    child_manager.spawn(cast("Any", call))
    assert call.told == [told]


def test_outcome_of_command_is_given_once_its_place_is_free() -> None:
    """Its shim reports the outcome before it has cleared the sandbox away, and the agent may call the next command."""
    spawning = types.SimpleNamespace(allowed=True, max_descendants=1)
    member = types.SimpleNamespace(
        agent_id="top", effective=types.SimpleNamespace(spawning=spawning), lineage=lambda **given: None
    )

    clears, clear = os.pipe()

    def start(asked: children.ChildRequest, say: children.Say) -> None:
        say({"admitted": {"on_parent_exit": "terminate"}})
        say({"ok": {"status": 0}})
        os.read(clears, 1)
        time.sleep(0.5)

    nothing, told = cast("Any", None), list[Mapping[str, Any]]()
    with Broker() as broker, open(os.devnull, "r+b") as null:
        manager = children.ChildManager(
            cast("Any", member), start=start, use=lambda: nothing, denied=nothing, used=nothing, grace_seconds=0
        )
        manager.served_by(broker)
        manager.started(60)
        streams = children.CommandStreams(("git",), null.fileno(), null.fileno(), null.fileno())

        def again(said: Mapping[str, Any]) -> None:
            told.append(said)
            if len(told) == 1:
                manager.run_command("tool", streams, timeout_ms=None, done=again)

        manager.run_command("tool", streams, timeout_ms=None, done=again)
        with pytest.raises(errors.SpawnBudgetViolation):
            manager.run_command("tool", streams, timeout_ms=None, done=again)
        os.write(clear, b"12")
        until = time.monotonic() + 60
        while len(told) < 2 and time.monotonic() < until:
            broker.serve()
        manager.close()
    os.close(clears)
    os.close(clear)
    assert told == [{"ok": {"status": 0}}] * 2

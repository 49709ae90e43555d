"""The sockets between a requester and a warm sandbox, which is a thread here."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import contract, denials, errors
from policy.package import Package
from sandbox.config import Config
from sandbox.lifecycle.types import Request
from sandbox.run_result import RunResult
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import label as rundir_label
from sandbox.standby import dispatch, wanted
from sandbox.standby.dispatch import PeerGoneError
from sandbox.supervisor import Supervisor

PACKAGE = Package({"agent.toml": b"[agent]"}, b"an envelope")
ISSUER = {"display": "operator@local", "pubkey": "1" * 44}
ANSWER = RunResult(
    run_id="r", intent_id="i", agent_id="a", policy_digest="p", error=None, stderr="e\n",
    result=contract.AgentResult("text", ("source",), ({"path": "x"},), ()),
    not_enforced=("one",), unknown_sections=("two",),
    denials=(denials.Row(denials.Denial("dns", "example.com", "not_granted"), 3),), timings={"run": 0.25},
)  # fmt: skip


def _request(package: Package = PACKAGE, text: str = "hi") -> Request:
    return Request(package, text, ISSUER, timeout_ms=5, package_name="/p")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


class Instance(threading.Thread):
    """Listens as one does, and does with each that comes what ``act`` says, until that says it is done."""

    def __init__(self, runs: Path, act: Callable[[socket.socket, dict[str, Any]], bool], name: str = "r") -> None:
        super().__init__(daemon=True)
        self._directory, self._act = runs / name, act
        self._directory.mkdir()
        self.seen: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self.start()
        assert self._ready.wait(60)

    def run(self) -> None:
        with dispatch.listening(self._directory, PACKAGE) as listener:
            self._ready.set()
            poll, done = select.poll(), False
            poll.register(listener.fileno(), select.POLLIN)
            while not done:
                poll.poll()
                came = dispatch.accepted(listener)
                if came is not None:
                    with came[0]:
                        self.seen.append(came[1])
                        done = self._act(*came)


def _offers(connection: socket.socket) -> None:
    dispatch.send(connection, {"offer": "r", "since": [1, 2, 3]})
    assert dispatch.receive(connection) == {"go": "r"}


def _answers(connection: socket.socket, message: dict[str, Any]) -> bool:
    _offers(connection)
    dispatch.send(connection, {"answer": ANSWER.to_json()})
    return True


def test_answer_comes_back_as_it_was_given(runs: Path) -> None:
    instance = Instance(runs, _answers)
    assert dispatch.ready(runs, PACKAGE) == 1
    assert dispatch.dispatch(runs, _request(), {}, settings="s") == ANSWER
    instance.join(60)
    assert dispatch.ordered(instance.seen[0], PACKAGE) == _request()
    assert dispatch.ready(runs, PACKAGE) == 0


def test_error_comes_back_as_error_that_it_was(runs: Path) -> None:
    def fails(connection: socket.socket, message: dict[str, Any]) -> bool:
        _offers(connection)
        dispatch.send(connection, {"error": errors.KernelError("no memory", hint="more").to_json()})
        return True

    Instance(runs, fails)
    with pytest.raises(errors.KernelError, match="no memory"):
        dispatch.dispatch(runs, _request(), {}, settings="s")


@pytest.mark.parametrize("other", [PACKAGE.with_envelope(b"another"), PACKAGE.with_envelope(None)])
def test_nobody_is_found_for_another_envelope(runs: Path, other: Package) -> None:
    instance = Instance(runs, _answers)
    assert dispatch.dispatch(runs, _request(other), {}, settings="s") is None
    assert instance.seen == []


def test_order_is_for_exactly_one_package() -> None:
    order = dispatch.order(_request(), "s")
    assert dispatch.ordered(order, PACKAGE) is not None
    assert dispatch.ordered(order, Package({"agent.toml": b"[other]"}, b"an envelope")) is None
    assert dispatch.ordered(order, PACKAGE.with_envelope(b"other")) is None


def test_who_is_sent_away_or_left_alone_starts_cold_and_who_is_not_does_not(runs: Path) -> None:
    def sent_away(connection: socket.socket, message: dict[str, Any]) -> bool:
        dispatch.send(connection, {"cold": "its limits were changed"})
        return True

    Instance(runs, sent_away, "a")
    Instance(runs, lambda connection, message: True, "b")  # it dies with the order in its hand
    assert dispatch.dispatch(runs, _request(), {}, settings="s") is None

    def cannot(connection: socket.socket, message: dict[str, Any]) -> bool:
        _offers(connection)
        dispatch.send(connection, {"cold": "its start could not be written down"})
        return True

    Instance(runs, cannot, "d")  # it says itself that nothing was begun
    assert dispatch.dispatch(runs, _request(), {}, settings="s") is None

    def dies(connection: socket.socket, message: dict[str, Any]) -> bool:
        _offers(connection)
        return True

    Instance(runs, dies, "c")
    # What was begun for us is not begun again elsewhere.
    with pytest.raises(errors.KeeperError):
        dispatch.dispatch(runs, _request(), {}, settings="s")


def test_whoever_may_end_it_does_and_hears_what_came_of_it(runs: Path) -> None:
    def until_left(connection: socket.socket, message: dict[str, Any]) -> bool:
        _offers(connection)
        connection.settimeout(60)
        assert connection.recv(1) == b""
        dispatch.send(connection, {"answer": ANSWER.to_json()})
        return True

    left = os.eventfd(1, os.EFD_CLOEXEC)
    watches = {left: lambda: errors.KilledError("left")}
    try:
        Instance(runs, until_left)
        assert dispatch.dispatch(runs, _request(), watches, settings="s") == ANSWER
    finally:
        os.close(left)


def test_one_not_wanted_is_told_why_and_one_gone_is_not_missed(runs: Path) -> None:
    instance = Instance(runs, lambda connection, message: True)
    dispatch.end(runs, "r", "too many")
    instance.join(60)
    assert instance.seen == [{"op": "end", "reason": "too many"}]
    dispatch.end(runs, "r", "again")
    dispatch.end(runs, "nobody", "again")


@pytest.mark.parametrize("raw", [b"", b"\0\0\0\5ab", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\3abc"])
def test_what_is_no_message_is_nobody(raw: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        theirs.sendall(raw)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerGoneError):
            dispatch.receive(ours)


def test_record_is_one_for_each_agent_id_and_another_for_another_envelope(tmp_path: Path) -> None:
    assert (wanted.wanted(tmp_path), wanted.version(tmp_path)) == ([], 0)
    keys = set()
    for envelope in (b"one", b"\xfftwo"):
        package = PACKAGE.with_envelope(envelope)
        wanted.want(tmp_path, package, agent_id="a", count=2, package_name="/p\udcff")
        (found,) = wanted.wanted(tmp_path)
        assert (found.envelope, found.count, found.package_name) == (envelope, 2, "/p\udcff")
        keys.add(found.key)
    wanted.want(tmp_path, PACKAGE, agent_id="b", count=1, package_name="/p")
    assert len(keys | {one.key for one in wanted.wanted(tmp_path)}) == 3
    wanted.drop(tmp_path, "a")
    assert [one.agent_id for one in wanted.wanted(tmp_path)] == ["b"]
    next((tmp_path / "standby").glob("*.json")).write_text("{}")
    assert wanted.wanted(tmp_path) == []


def test_one_at_whose_door_too_many_wait_is_not_waited_for_and_asked_again(runs: Path) -> None:
    (runs / "r").mkdir()
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(dispatch.listening(runs / "r", PACKAGE))
        waiting: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(
                    stack.enter_context(dispatch.connect(runs / "r", dispatch.socket_name(PACKAGE), seconds=0.0))
                )
        assert dispatch.end(runs, "r", "too many") is False
        for one in waiting:
            one.close()
        while dispatch.end(runs, "r", "too many") is False:
            dispatch.accepted(door)


def test_copy_of_package_in_another_place_changes_no_record(tmp_path: Path) -> None:
    """Else each requester could end the warm sandboxes of all by a run of its own copy."""

    def wants(place: str, count: int = 2) -> tuple[int, list[str]]:
        wanted.want(tmp_path, PACKAGE, agent_id="a", count=count, package_name=place)
        (record,) = (tmp_path / "standby").glob("*.json")
        return record.stat().st_ino, [one.key for one in wanted.wanted(tmp_path)]

    first = wants("/p")
    assert wants("uid1000@local:/home/x/copy") == first
    # The control: what is another in any other way takes its place.
    assert wants("/p", count=3)[0] != first[0]


def _run_refused(state: Path, missing_mb: int | None) -> None:
    """A cold run that rule 6 refuses for so much."""
    one: Any = object.__new__(Supervisor)
    one.path, one.config, one.keeps_standby = state, Config(), True
    details: dict[str, Any] = {} if missing_mb is None else {"missing_mb": missing_mb}

    def refused(request: Request, watches: object, after: object) -> RunResult:
        if dispatch.idle_mb(state / "runs"):
            raise errors.ResourceViolation("memory_mb needs more", grant="resources.memory_mb", **details)
        return ANSWER

    one._run_cold = refused
    assert one.run(_request(PACKAGE.with_envelope(b"another"))) == ANSWER


@pytest.mark.parametrize(("missing_mb", "ends"), [(100, True), (101, False), (None, False)])
def test_what_waits_gives_way_only_where_that_would_be_enough(runs: Path, missing_mb: int | None, ends: bool) -> None:
    """A caller could ask for more than there is, again and again, and each time all that waits for others would end."""
    label = {rundir_label.STANDBY: "yes", "host_memory_mb": "100"}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(rundir_directory.RunDirectory(runs / "r", label))
        door = stack.enter_context(dispatch.listening(directory.path, PACKAGE))
        seen: list[dict[str, Any]] = []

        def waits() -> None:
            poll = select.poll()
            poll.register(door.fileno(), select.POLLIN)
            while (came := dispatch.accepted(door)) is None:
                poll.poll()
            with came[0]:
                seen.append(came[1])
                stack.close()

        if ends:
            thread = threading.Thread(target=waits)
            thread.start()
            _run_refused(runs.parent, missing_mb)
            thread.join()
            assert [one["op"] for one in seen] == ["end"]
        else:
            with pytest.raises(errors.ResourceViolation):
                _run_refused(runs.parent, missing_mb)
            assert dispatch.accepted(door) is None  # there is no client
            assert dispatch.idle_mb(runs) == 100


def test_silent_client_is_let_go_and_next_served(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ORDER_SECONDS", 0.1)
    instance, name = Instance(runs, _answers), dispatch.socket_name(PACKAGE)
    with dispatch.connect(runs / "r", name) as silent:
        assert dispatch.dispatch(runs, _request(), {}, settings="s") == ANSWER
        instance.join(60)
        assert silent.recv(1) == b""
    assert len(instance.seen) == 1

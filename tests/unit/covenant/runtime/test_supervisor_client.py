"""Check the daemon's client of the supervisor against a double that speaks its frames."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.runtime import package_signatures, supervisor_client, supervisor_report
from covenant.runtime.agents import Agents
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Usage, spent
from covenant.runtime.supervisor_client import Supervised
from covenant.wire.types import AgentId, Priority
from policy import errors
from sandbox import unix_wire
from sandbox.serve.api import paths, protocol
from tests import runtime_kit, supervisor_double
from tests.supervisor_double import Document, SupervisorDouble

pytestmark = pytest.mark.anyio


@pytest.fixture
async def card(tmp_path: Path) -> Card:
    runtime_kit.package(tmp_path, "a")
    agents = Agents(tmp_path)
    await agents.reload()
    return agents.find("a")


def _asking(path: Path, **settings: Any) -> Supervised:
    def connect() -> socket.socket:
        # As in production, except that the peer is the user who runs the tests instead of root.
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        return sock

    return Supervised(connect, now_ms=lambda: 1_000, **settings)


def _intent(text: str = "hi", priority: Priority = Priority.NORMAL) -> Intent:
    return Intent(str(uuid.uuid4()), text, 1_000, priority)


async def _run(asking: Supervised, card: Card, intent: Intent, deadline: int | None = None) -> RunResult:
    with anyio.fail_after(60):
        return await asking.run(card, intent, caller=runtime_kit.ALICE, deadline=deadline)


async def test_run_is_asked_with_package_s_descriptor_and_intent_s_own_id(tmp_path: Path, card: Card) -> None:
    intent = _intent("größe", Priority.LOW)
    with SupervisorDouble(tmp_path / "s.sock") as double:
        result = await _run(_asking(double.path), card, intent, deadline=6_000)
    assert (result.text, result.policy_digest) == ("a: größe", "a" * 64)
    assert result.usage == Usage(20, 1 << 20, 30)
    (request,) = double.requests
    known = {"kind", "text", "intent_id", "priority", "timeout_ms", "manifest_sha256", "on_behalf_of", "rows"}
    assert known | {"agent_id"} == set(request)
    # The supervisor's own closed model accepts these fields.
    asked = protocol.parse(json.dumps({name: request[name] for name in known}).encode())
    assert isinstance(asked, protocol.RunRequest)
    assert asked.manifest_sha256 == hashlib.sha256((card.directory / "agent.toml").read_bytes()).hexdigest()
    assert asked.on_behalf_of is not None
    assert asked.on_behalf_of.pubkey_b58 == runtime_kit.ALICE.pubkey
    assert asked.on_behalf_of.display == runtime_kit.ALICE.display
    assert (request["intent_id"], request["priority"], request["timeout_ms"]) == (intent.id, "low", 5_000)


async def test_what_failed_run_used_comes_with_its_error(tmp_path: Path, card: Card) -> None:
    def fails(request: Document) -> Document:
        error = errors.OutOfMemoryError("the agent used more memory than memory_mb", hint="raise it").to_json()
        return supervisor_double.answer(request, "", result=None, error=error, run_id="r")

    with SupervisorDouble(tmp_path / "s.sock", fails) as double, pytest.raises(errors.OutOfMemoryError) as raised:
        await _run(_asking(double.path), card, _intent())
    took = spent(raised.value)
    assert took is not None
    assert (took.run_id, took.usage.cpu_ms) == ("r", 20)


def _lines(run_id: str, child: str) -> list[bytes]:
    state = {"state": "Running", "reason": "größe"}
    return [supervisor_double.row("run_state", one, **state) for one in (run_id, child)]


async def test_rows_of_run_come_as_they_stand_and_its_family_is_billed(tmp_path: Path, card: Card) -> None:
    lines = _lines("r", "c")
    family = {"runs": 2, "unended": 1, "uncounted": 0, "cpu_ms": 5_000, "memory_byte_ms": 7, "wall_ms": 90}
    family["credits"] = 6

    def tells(request: Document) -> Document:
        return supervisor_double.told(request, *lines, family=family)

    with SupervisorDouble(tmp_path / "s.sock", tells=tells) as double:
        found = (await _run(_asking(double.path), card, _intent())).told
    assert found is not None
    assert [(row.line or "").encode() for row in found.rows] == lines
    assert [(row.anchor.index, row.kind, row.run_id) for row in found.rows] == [
        (7, "run_state", "r"),
        (8, "run_state", "c"),
    ]
    assert (found.origin, found.left_out, found.missing) == (supervisor_double.ORIGIN, 0, "")
    billed = supervisor_report.billed(Usage(20, 1 << 20, 30), found)
    assert (billed.cpu_ms, billed.memory_byte_ms, billed.wall_ms, billed.credits) == (5_000, 30 << 20, 90, 6)


async def test_many_rows_come_as_well_as_few(tmp_path: Path, card: Card) -> None:
    lines = _lines("r", "c") * 200

    def tells(request: Document) -> Document:
        return supervisor_double.told(request, *lines)

    with SupervisorDouble(tmp_path / "s.sock", tells=tells) as double:
        found = (await _run(_asking(double.path), card, _intent())).told
    assert found is not None
    assert [(row.line or "").encode() for row in found.rows] == lines


async def test_refusal_brings_its_rows_as_well(tmp_path: Path, card: Card) -> None:
    def refuses(request: Document) -> Document:
        return errors.UnsignedError("the package is not signed").to_json()

    def tells(request: Document) -> Document:
        return supervisor_double.told(request, *_lines("r", "c"))

    with (
        SupervisorDouble(tmp_path / "s.sock", refuses, tells=tells) as double,
        pytest.raises(errors.UnsignedError) as raised,
    ):
        await _run(_asking(double.path), card, _intent())
    found = supervisor_report.of(raised.value)
    assert found is not None
    assert len(found.rows) == 2


def _broken(**changes: Any) -> Callable[[Document], Document]:
    return lambda request: {**supervisor_double.told(request, *_lines("r", "c")), **changes}


def _forged(request: Document) -> Document:
    document = supervisor_double.told(request, *_lines("r", "c"))
    document["rows"][1][1] = document["rows"][1][1].replace("Running", "Walking")
    return document


@pytest.mark.parametrize(
    ("tells", "why"),
    [
        (_forged, "no rows"),
        (_broken(origin="b"), "no rows"),
        (_broken(rows=[["{}", None]]), "no rows"),
        (_broken(rows=[["x"]]), "no rows"),
        (_broken(rows=[[1, "x"]]), "no rows"),
        (_broken(left_out=-1), "no rows"),
        (_broken(family={}), "no rows"),
        (_broken(family={**dict.fromkeys(supervisor_report.Family.__slots__, 0), "cpu_ms": True}), "no rows"),
        (_broken(missing="the disk"), "the disk"),
        (_broken(left_out=3), "3 are not"),
        (_broken(whole=False), "grew"),
    ],
)
async def test_rows_none_are_said_to_be_missing(
    tmp_path: Path, card: Card, tells: Callable[[Document], Document], why: str
) -> None:
    with SupervisorDouble(tmp_path / "s.sock", tells=tells) as double:
        result = await _run(_asking(double.path), card, _intent())
    assert result.told is not None
    assert why in result.told.missing
    assert result.text


async def test_refusal_used_nothing(tmp_path: Path, card: Card) -> None:
    def refuses(request: Document) -> Document:
        return errors.UnsignedError("the package is not signed").to_json()

    with SupervisorDouble(tmp_path / "s.sock", refuses) as double, pytest.raises(errors.UnsignedError) as raised:
        await _run(_asking(double.path), card, _intent())
    assert spent(raised.value) is None


async def test_without_supervisor_nothing_is_run_and_error_says_what_to_do(tmp_path: Path, card: Card) -> None:
    connect = supervisor_client.connector([str(tmp_path / "s.sock")], named=True)
    with pytest.raises(errors.NoSupervisorError) as raised:
        await _run(Supervised(connect, now_ms=lambda: 1_000), card, _intent())
    assert "covenant-supervisor" in raised.value.hint


async def test_cancelled_call_ends_its_run(tmp_path: Path, card: Card) -> None:
    intent = _intent()
    with SupervisorDouble(tmp_path / "s.sock", lambda request: None) as double:
        async with anyio.create_task_group() as group:
            group.start_soon(_run, _asking(double.path), card, intent)
            await _until(lambda: bool(double.requests))
            group.cancel_scope.cancel()
        await _until(lambda: double.gone == [intent.id])


async def test_run_is_found_by_its_intent_and_ended_with_grace(tmp_path: Path, card: Card) -> None:
    intent = _intent()
    raised: list[errors.CovenantError] = []

    async def runs() -> None:
        try:
            await _run(asking, card, intent)
        except errors.CovenantError as e:
            raised.append(e)

    with SupervisorDouble(tmp_path / "s.sock", lambda request: None) as double:
        asking = _asking(double.path, grace_ms=700)
        async with anyio.create_task_group() as group:
            group.start_soon(runs)
            await _until(lambda: bool(double.requests))
            assert await asking.end(str(uuid.uuid4()), reason="budget") is False
            assert await asking.end(intent.id, reason="budget") is True
        assert double.requests[-1]["grace_ms"] == 700
        assert double.requests[-1]["reason"] == "budget"
    assert [type(one) for one in raised] == [errors.KilledError]


async def test_console_s_request_is_sent_as_it_is(tmp_path: Path, card: Card) -> None:
    intent = _intent()
    with SupervisorDouble(tmp_path / "s.sock", lambda request: None) as double:
        asking = _asking(double.path)
        async with anyio.create_task_group() as group:
            group.start_soon(_killed, asking, card, intent)
            await _until(lambda: bool(double.requests))
            [run] = (await asking.ask("ps"))["runs"]
            assert run["intent_id"] == intent.id
            await asking.ask("operate", operation="kill", run=run["run_id"], reason="console", tree=False)
        assert double.requests[-1]["reason"] == "console"


async def test_run_is_ended_at_once_with_all_that_it_started(tmp_path: Path, card: Card) -> None:
    intent = _intent()
    with SupervisorDouble(tmp_path / "s.sock", lambda request: None) as double:
        asking = _asking(double.path)
        async with anyio.create_task_group() as group:
            group.start_soon(_killed, asking, card, intent)
            await _until(lambda: bool(double.requests))
            assert await asking.end(intent.id, reason="revoked", whole=True) is True
    ended = double.requests[-1]
    assert (ended["tree"], "grace_ms" in ended, ended["reason"]) == (True, False, "revoked")


async def _killed(asking: Supervised, card: Card, intent: Intent) -> None:
    with pytest.raises(errors.KilledError):
        await _run(asking, card, intent)


async def test_busy_supervisor_is_asked_again_until_every_run_was_taken(tmp_path: Path, card: Card) -> None:
    """The supervisor accepts three runs at a time, and the client asks for eight."""
    with SupervisorDouble(tmp_path / "s.sock", most=3) as double:
        asking = _asking(double.path, most=8)
        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(_run, asking, card, _intent(str(number)))
    assert sorted(int(one["text"]) for one in double.requests) == list(range(30))


async def test_no_peer_has_so_many_runs_that_operator_waits_for_them(tmp_path: Path, card: Card) -> None:
    """A run lasts as long as its manifest grants, and a peer may ask for one on each of its connections."""
    over = threading.Event()

    def lasts(request: Document) -> Document:
        assert request["text"] == "operator's" or over.wait(60)
        return supervisor_double.answer(request, request["text"])

    operator = AgentId(display="user@local", pubkey="operator")
    with SupervisorDouble(tmp_path / "s.sock", lasts) as double:
        asking = _asking(double.path, most=4, operator=operator.pubkey)
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(_run, asking, card, _intent(str(number)))
            with anyio.fail_after(60):
                while len(double.requests) < 2:  # noqa: ASYNC110 - what the double heard
                    await anyio.sleep(0.005)
                mine = await asking.run(card, _intent("operator's"), caller=operator, deadline=None)
            assert mine.text == "operator's"
            assert len(double.requests) == 3
            over.set()
    assert len(double.requests) == 21


async def test_package_of_another_agent_gives_no_answer(tmp_path: Path, card: Card) -> None:
    def another(request: Document) -> Document:
        return supervisor_double.answer(request, "x", agent_id="b")

    with SupervisorDouble(tmp_path / "s.sock", another) as double, pytest.raises(errors.StaleAgentError):
        await _run(_asking(double.path), card, _intent())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00\x00",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x02[]",
        b"\xff\xff\xff\xff",
        b'\x00\x00\x00\x13{"kind": "answer"}  ',
    ],
    ids=["nothing", "half a length", "no json", "no object", "too long", "no answer"],
)
async def test_whoever_does_not_speak_as_supervisor_is_error(tmp_path: Path, card: Card, said: bytes) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s.sock"))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(said)

    with listener:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, serve)
            with pytest.raises(errors.ServiceError):
                await _run(_asking(tmp_path / "s.sock"), card, _intent())


async def test_supervisor_that_never_answers_is_not_waited_for_for_ever(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_client, "_patience", lambda card: 1.0)
    intent = _intent()
    with SupervisorDouble(tmp_path / "s.sock", lambda request: None) as double:
        with pytest.raises(errors.ServiceError, match="longer than its clocks"):
            await _run(_asking(double.path), card, intent)
        await _until(lambda: double.gone == [intent.id])


async def test_intent_too_long_is_not_sent(tmp_path: Path, card: Card) -> None:
    with SupervisorDouble(tmp_path / "s.sock") as double, pytest.raises(errors.UsageError):
        await _run(_asking(double.path), card, _intent("x" * unix_wire.REQUEST_BYTES))
    assert double.requests == []


async def _until(look: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not look():  # noqa: ASYNC110 - what is waited for happens in a thread
            await anyio.sleep(0.01)


async def test_package_is_verified_by_its_descriptor_and_what_was_seen(tmp_path: Path, card: Card) -> None:
    with SupervisorDouble(tmp_path / "s.sock", _checked("a")) as double, anyio.fail_after(60):
        assert await _asking(double.path).check(card)
    (request,) = double.requests
    del request["agent_id"]
    asked = protocol.parse(json.dumps(request).encode())
    assert isinstance(asked, protocol.CheckPackage)
    assert asked.manifest_sha256 == hashlib.sha256((card.directory / "agent.toml").read_bytes()).hexdigest()


def _checked(agent_id: str) -> Callable[[Document], Document]:
    return lambda request: {"kind": "checked", "agent_id": agent_id}


def _refusing(error: errors.CovenantError) -> Callable[[Document], Document]:
    def act(request: Document) -> Document:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "refused"),
    [
        (_refusing(errors.RevokedError("the key is revoked")), errors.RevokedError),
        (_refusing(errors.RequestError("the request is refused: of unknown kind")), errors.RequestError),
        (_checked("b"), errors.ServiceError),
    ],
    ids=["refused", "not understood", "of another agent"],
)
async def test_supervisor_that_does_not_say_yes_has_said_no(
    act: Callable[[Document], Document], refused: type[errors.CovenantError], tmp_path: Path, card: Card
) -> None:
    with SupervisorDouble(tmp_path / "s.sock", act) as double, anyio.fail_after(60), pytest.raises(refused):
        await _asking(double.path).check(card)


async def test_only_where_machine_has_none_nobody_was_asked(tmp_path: Path, card: Card) -> None:
    nowhere = Supervised(supervisor_client.connector([str(tmp_path / "none.sock")], named=False), now_ms=lambda: 1_000)
    assert not await nowhere.check(card)
    strange = _refusing(errors.CallerError("this user may not ask the supervisor"))
    with (
        SupervisorDouble(tmp_path / "s.sock", strange) as double,
        anyio.fail_after(60),
        pytest.raises(errors.CallerError),
    ):
        await _asking(double.path).check(card)


@pytest.mark.parametrize(
    "how",
    ["named", "reached", "marked", "mark unseen", "mark astray", "left its socket", "another's", "of the machine"],
)
async def test_supervisor_only_away_is_waited_for_and_not_replaced(
    how: str, tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, mark = tmp_path / "s.sock", tmp_path / "mark"
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(place))
    monkeypatch.setattr(paths, "SYSTEM_STATE", str(tmp_path / "state"))

    def asking() -> Supervised:
        connect = supervisor_client.connector([str(place)], named=how == "named", mark=mark)
        return Supervised(connect, now_ms=lambda: 1_000)

    one = asking()
    if how != "named":
        # The control: no record says that there is a supervisor, so none decides.
        assert not await one.check(card)
    if how in {"reached", "marked"}:
        with SupervisorDouble(place, _checked("a")), anyio.fail_after(60):
            assert await one.check(card)
        place.unlink(missing_ok=True)
        assert mark.is_file()
        if how == "reached":
            mark.unlink()
        else:
            one = asking()  # the daemon was restarted as well
    elif how == "left its socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(place))
    elif how == "mark astray":
        mark.symlink_to(tmp_path / "none")
    elif how in {"another's", "mark unseen"}:
        real, unseen = os.lstat, str(place if how == "another's" else mark)

        def lstat(path: Any, **more: Any) -> os.stat_result:
            if str(path) == unseen:
                raise PermissionError(errno.EACCES, "no", path)
            return real(path, **more)

        monkeypatch.setattr(os, "lstat", lstat)
    elif how == "of the machine":
        (tmp_path / "state").mkdir()
    with pytest.raises(errors.NoSupervisorError) as raised:
        await one.check(card)
    assert "ask again" in raised.value.hint
    assert (str(mark) in raised.value.hint) == (how in {"marked", "mark unseen", "mark astray"})
    verified: list[Card] = []
    with pytest.raises(errors.NoSupervisorError):
        await package_signatures.ask_or_verify(card, ask=one.check, verify=verified.append)
    assert verified == []


@pytest.mark.parametrize("there", [True, False])
async def test_package_is_verified_here_only_where_no_other_did(there: bool, card: Card) -> None:
    verified: list[Card] = []

    async def ask(asked: Card) -> bool:
        return there

    await package_signatures.ask_or_verify(card, ask=ask, verify=verified.append)
    assert verified == ([] if there else [card])

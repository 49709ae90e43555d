"""The process that writes the log for the daemon: whichever of the two dies, and whatever is said between them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.stores.audit import dictation, files, frames, places, scribe
from covenant.stores.audit.durable import DurableAudit
from covenant.wire.types import AgentId
from policy import audit, base58, errors, events, ledger

pytestmark = pytest.mark.anyio

DAEMON = AgentId(display="user@local", pubkey=base58.encode(b"d" * 32))
BODY = events.body_text(
    events.issuer_text({"display": DAEMON.display, "pubkey": DAEMON.pubkey}),
    events.kind_text("authentication_failed", {"transport": "ipc", "reason": "x"}, of_no_run=True),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


async def opened(home: Path, crowds: int | None = 0) -> DurableAudit:
    return await DurableAudit.open(home, issuer=DAEMON, now_ms=lambda: 1_000, crowds=crowds)


def failed(n: object) -> dict[str, Any]:
    return {"transport": "ipc", "reason": f"row {n}"}


async def row(log: DurableAudit, n: object) -> str:
    return await log.append("authentication_failed", failed(n))


async def crowd(log: DurableAudit, count: int, name: str = "w") -> list[str]:
    made: list[str] = []

    async def one(n: int) -> None:
        made.append(await row(log, f"{name}{n}"))

    async with anyio.create_task_group() as group:
        for n in range(count):
            group.start_soon(one, n)
    return made


def process(log: DurableAudit) -> subprocess.Popen[bytes]:
    assert log._dictation is not None
    found = log._dictation._process
    assert found is not None
    return found


def offline(home: Path) -> audit.Report:
    key = ledger.read_public_key((home / "audit-head" / "ledger.pub").read_bytes())
    names = ("audit/events.jsonl", "audit/events.chain.jsonl", "audit-head/head.json")
    log, chain, head = ((home / name).read_bytes() for name in names)
    return audit.verify(log, chain, head, key)


async def there(home: Path) -> set[str]:
    async with await opened(home, None) as log:
        assert (await log.verify()).valid
        return {one.id for one in await log.recent(10**6)}


async def until(look: Callable[[], object]) -> None:
    with anyio.fail_after(60):
        while not look():  # noqa: ASYNC110 - what another process did
            await anyio.sleep(0.005)


# Who writes --------------------------------------------------------------------------------------------------------


async def test_crowds_bring_a_scribe_and_a_purge_takes_the_log_back(home: Path) -> None:
    made: list[str] = []
    async with await opened(home, crowds=2) as log:
        made.append(await row(log, "alone"))
        assert log._dictation is None
        for turn in range(2):
            made += await crowd(log, 40, f"a{turn}")
        await until(lambda: log._dictation is not None and log._dictation.begun)
        first = process(log)
        made += await crowd(log, 200, "b")
        assert (await log.verify()).events == len(made)
        assert (await log.purge(1)).purged == 0
        assert log._dictation is None
        assert first.poll() == 0
        for turn in range(16):
            made += await crowd(log, 20, f"c{turn}")
        await until(lambda: log._dictation is not None and log._dictation.begun)
        made += await crowd(log, 40, "d")
        assert {one.id for one in await log.recent(10**6)} == set(made)
    assert (offline(home).valid, offline(home).events) == (True, len(made))
    assert await there(home) == set(made)


async def test_the_files_are_those_that_the_thread_writes(home: Path) -> None:
    """But for the random ids: each row's length, and with it every offset, is the same."""
    shapes = []
    for name, crowds in (("thread", None), ("scribe", 0)):
        place = home / name
        place.mkdir(mode=0o700)
        async with await opened(place, crowds) as log:
            for n in range(5):
                await crowd(log, 7, str(n))
        report = offline(place)
        assert report.valid
        lines = [(place / "audit" / f).read_bytes().splitlines() for f in ("events.jsonl", "events.chain.jsonl")]
        shapes.append([sorted(json.loads(line)["kind"]["reason"] for line in lines[0]), [len(x) for x in lines[1]]])
    assert shapes[0] == shapes[1]


async def test_where_no_process_can_be_started_the_thread_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: socket.socket) -> subprocess.Popen[bytes]:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(dictation, "_spawn", refused)
    async with await opened(home) as log:
        assert log._dictation is None
        made = await crowd(log, 40)
    assert await there(home) == set(made)


async def test_the_key_is_in_no_argument_and_no_variable(home: Path) -> None:
    async with await opened(home) as log:
        await row(log, 1)
        place = Path(f"/proc/{process(log).pid}")
        shown = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        key = log._files.key.private_bytes_raw()
        assert key not in shown
        assert key.hex().encode() not in shown


async def test_a_stop_of_the_whole_group_is_the_daemons_to_hear(home: Path) -> None:
    async with await opened(home) as log:
        await row(log, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process(log).send_signal(number)
        last = await row(log, "daemon_stopped")
        ended = process(log)
    assert ended.returncode == 0
    assert last in await there(home)


async def test_a_terminal_that_stops_the_whole_group_stops_no_scribe(home: Path) -> None:
    """Whoever has the daemon go on by its process id alone would have a log that takes no row and says nothing."""
    async with await opened(home) as log:
        await row(log, 1)
        scribe_pid = process(log).pid
        for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            process(log).send_signal(number)
            # Not only by what it does: the kernel stops nobody whose process group has nobody left to have it go on.
            status = Path(f"/proc/{scribe_pid}/status").read_text().split()
            assert int(status[status.index("SigBlk:") + 1], 16) >> number - 1 & 1
        with anyio.fail_after(60):
            last = await row(log, 2)
    assert last in await there(home)


async def test_closing_writes_what_waits(home: Path) -> None:
    log = await opened(home)
    waiting = [asyncio.ensure_future(row(log, n)) for n in range(200)]
    await anyio.lowlevel.checkpoint()
    await log.close()
    assert await there(home) == set(await asyncio.gather(*waiting))
    with pytest.raises(errors.StoreError, match="it was closed"):
        await row(log, "late")


async def test_who_goes_away_before_it_is_sent_has_no_row(home: Path) -> None:
    async with await opened(home) as log:
        gone = asyncio.ensure_future(row(log, "gone"))
        await anyio.lowlevel.checkpoint()
        gone.cancel()
        stays = await row(log, "stays")
        await log.caught_up()
        assert [one.id for one in await log.recent(9)] == [stays]


async def test_a_purge_that_nobody_waits_for_any_more_leaves_the_log_whole(home: Path) -> None:
    async with await opened(home) as log:
        made = await crowd(log, 40)
        purge = asyncio.ensure_future(log.purge(1))
        await anyio.lowlevel.checkpoint()
        purge.cancel()
        made += await crowd(log, 40, "b")
        assert (await log.verify()).events == len(made)
    assert await there(home) == set(made)


# Who dies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 40, 300])
async def test_a_scribe_that_is_killed_ends_the_log_and_nothing_that_was_acknowledged(home: Path, after: int) -> None:
    log = await opened(home)
    made: list[str] = []
    refused: list[errors.StoreError] = []

    async def write(name: int) -> None:
        n = 0
        while len(refused) < 48:
            try:
                made.append(await row(log, f"{name} {n}"))
                n += 1
            except errors.StoreError as e:
                refused.append(e)
                return

    async def kill() -> None:
        await until(lambda: len(made) >= after)
        process(log).kill()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            for name in range(48):
                group.start_soon(write, name)
    assert len(refused) == 48
    assert "takes no more records after: its scribe" in refused[0].message
    for late in (row(log, "late"), log.purge(1), log.verify()):
        with pytest.raises(errors.StoreError, match="takes no more records"):
            await late
    await log.close()
    assert set(made) <= await there(home)
    assert offline(home).valid


async def test_whoever_opens_the_log_waits_for_a_writer_that_is_ending(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(home)
    made = await row(log, 1)
    monkeypatch.setattr(places, "_LOCK_SECONDS", 0.05)
    with pytest.raises(errors.LedgerError, match="another process has had the log open"):
        await opened(home)
    monkeypatch.setattr(places, "_LOCK_SECONDS", 60.0)
    # As a daemon that is killed while its scribe hangs: nobody of it holds the log but the scribe.
    ended = process(log)
    ended.send_signal(signal.SIGSTOP)
    assert log._dictation is not None
    log._dictation._silence()
    log._files.close(settled=False)
    log._files.at.close()
    try:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.2):
                await asyncio.shield(waiting := asyncio.ensure_future(there(home)))
    finally:
        ended.send_signal(signal.SIGCONT)
    assert await waiting == {made}
    await anyio.to_thread.run_sync(ended.wait)
    await log._kept.close()


async def test_no_room_refuses_the_rows_and_later_takes_others(home: Path) -> None:
    async with await opened(home) as log:
        made = [await row(log, 1)]
        size = (home / "audit" / "events.jsonl").stat().st_size
        limits = resource.prlimit(
            process(log).pid, resource.RLIMIT_FSIZE, (files.PENDING_BYTES, resource.RLIM_INFINITY)
        )
        big = {"transport": "ipc", "reason": "x" * files.PENDING_BYTES}
        with pytest.raises(errors.StoreFullError, match="could not take 1 rows"):
            await log.append("authentication_failed", big)
        assert (home / "audit" / "events.jsonl").stat().st_size == size
        made += await crowd(log, 40)
        resource.prlimit(process(log).pid, resource.RLIMIT_FSIZE, limits)
        made.append(await log.append("authentication_failed", big))
        assert (await log.verify()).events == 42
    assert await there(home) == set(made)


# Between the two -------------------------------------------------------------------------------------------------


@contextmanager
def stopped(log: DurableAudit) -> Iterator[None]:
    """Its scribe does nothing meanwhile."""
    theirs = process(log)
    theirs.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, theirs.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        theirs.send_signal(signal.SIGCONT)


async def test_rows_that_come_while_the_log_is_taken_back_are_written_by_the_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, reaped = threading.Event(), dictation._reaped

    def slowly(one: subprocess.Popen[bytes]) -> bool:
        assert ends.wait(60)
        return reaped(one)

    monkeypatch.setattr(dictation, "_reaped", slowly)
    async with await opened(home) as log:
        made = [await row(log, 1)]
        taken = log._dictation
        purge = asyncio.ensure_future(log.purge(1))
        await until(lambda: taken is not None and not taken.begun)
        late = asyncio.ensure_future(crowd(log, 40))
        # Nobody but us has the log by now, however long the process takes to be gone.
        assert (await log.verify()).events == 1
        ends.set()
        made += await late
        assert (await purge).purged == 0
        assert (await log.verify()).events == len(made) == 41
    assert await there(home) == set(made)


async def test_who_asks_for_the_files_behind_a_purge_is_answered(home: Path) -> None:
    async with await opened(home) as log:
        made = await crowd(log, 40)
        taken = log._dictation
        assert taken is not None
        with stopped(log):
            purge = asyncio.ensure_future(log.purge(1))
            await until(lambda: taken._ending)
            asked = [asyncio.ensure_future(log.verify()) for _ in range(3)]
            late = asyncio.ensure_future(crowd(log, 3, "late"))
            await anyio.sleep(0.05)
        with anyio.fail_after(60):
            await purge
            assert all(report.valid for report in await asyncio.gather(*asked))
            made += await late
    assert await there(home) == set(made)


@pytest.mark.parametrize("crowds", [0, None])
async def test_more_readers_than_there_are_threads_for_them_are_answered(home: Path, crowds: int | None) -> None:
    many = int(anyio.to_thread.current_default_thread_limiter().total_tokens) + 20
    async with await opened(home, crowds) as log:
        await row(log, 1)
        with anyio.fail_after(60):
            reports = await asyncio.gather(*[log.verify() for _ in range(many)])
        assert {(report.events, report.valid) for report in reports} == {(1, True)}


@contextmanager
def deaf(log: DurableAudit) -> Iterator[Callable[[], list[int]]]:
    """The daemon hears nothing of its scribe meanwhile; what kinds of answers wait for it."""
    taken, loop = log._dictation, asyncio.get_running_loop()
    assert taken is not None
    assert taken._sock is not None
    sock = taken._sock

    def said() -> list[int]:
        incoming, kinds = frames.Incoming(), []
        try:
            incoming.feed(sock.recv(1 << 20, socket.MSG_PEEK))
        except BlockingIOError:
            return []
        while frame := incoming.take():
            kinds.append(frame[0])
        return kinds

    loop.remove_reader(sock.fileno())
    yield said
    loop.add_reader(sock.fileno(), taken._readable)


async def test_what_is_acknowledged_behind_an_answer_about_the_files_is_not_part_of_it(home: Path) -> None:
    """All three answers come in one piece: sizes of one moment go with the head of that moment."""
    async with await opened(home) as log:
        with deaf(log) as said:
            first = asyncio.ensure_future(row(log, 1))
            await until(lambda: said() == [frames.DONE])
            asked = asyncio.ensure_future(log._shown())
            await until(lambda: said() == [frames.DONE, frames.SHOWN])
            second = asyncio.ensure_future(row(log, 2))
            await until(lambda: said() == [frames.DONE, frames.SHOWN, frames.DONE])
        shown = await asked
        assert shown is not None
        assert (shown.head.count, shown.head.events_bytes) == (1, shown.events_bytes)
        assert len({await first, await second}) == 2


async def test_a_scribe_that_waits_for_more_hears_that_nothing_more_comes_however_much_is_underway(home: Path) -> None:
    def big(size: int) -> asyncio.Future[Any]:
        return asyncio.ensure_future(log.append("authentication_failed", {"transport": "ipc", "reason": "x" * size}))

    async with await opened(home) as log:
        with deaf(log) as said:
            waiting = [big(900_000)]
            await until(lambda: said() == [frames.DONE])
            # Just as many at once as are sent before it is known that nobody else is ready, and few rows.
            waiting += [asyncio.ensure_future(log.caught_up()) for _ in range(scribe.CROWD - 1)]
            waiting.append(big(200_000))
            await until(lambda: log._dictation is not None and log._dictation._underway > 1 << 20)
        with anyio.fail_after(60):
            await asyncio.gather(*waiting)
        assert (await log.verify()).events == 2


async def test_no_room_amid_rows_that_follow_refuses_none_that_is_there(home: Path) -> None:
    async with await opened(home) as log:
        made = await crowd(log, 3)
        resource.prlimit(process(log).pid, resource.RLIMIT_FSIZE, (files.PENDING_BYTES, resource.RLIM_INFINITY))
        with stopped(log):
            big = {"transport": "ipc", "reason": "x" * files.PENDING_BYTES}
            waiting = [asyncio.ensure_future(log.append("authentication_failed", big))]
            for n in range(100):
                waiting.append(asyncio.ensure_future(row(log, n)))
                await anyio.lowlevel.checkpoint()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [one for one in found if isinstance(one, errors.StoreFullError)]
        made += [one for one in found if isinstance(one, str)]
        assert len(refused) + len(made) == 104
        assert refused[0] is found[0]
        assert len({id(one) for one in refused}) == len(refused)
        made.append(await row(log, "last"))
        assert (await log.verify()).events == len(made)
    assert await there(home) == set(made)


async def test_readers_get_in_where_a_scribe_was_killed_that_kept_them_out(home: Path) -> None:
    log = await opened(home)
    await row(log, 1)
    with stopped(log):
        # As it holds the lock: its descriptors are ours.
        fcntl.flock(log._files.events, fcntl.LOCK_EX)
        process(log).kill()
    with (home / "audit" / "events.jsonl").open("rb") as reader:

        def lets_in() -> bool:
            try:
                fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        await until(lets_in)
    with pytest.raises(errors.StoreError, match="takes no more records"):
        await row(log, 2)
    await log.close()
    assert len(await there(home)) == 1


@pytest.mark.parametrize("seen", [True, False])
async def test_a_scribe_that_dies_before_it_has_the_log_costs_no_row(
    home: Path, monkeypatch: pytest.MonkeyPatch, *, seen: bool
) -> None:
    waiting: list[dictation.Waiter] = []
    begin, start = dictation.Dictation.begin, dictation.Dictation.start

    def killed(of: dictation.Dictation) -> None:
        waiting.append(of.submit(((BODY, DAEMON.pubkey),)))
        if not seen:
            assert of._process is not None
            of._process.kill()
            of._process.wait()
        begin(of)

    async def started(of: dictation.Dictation) -> None:
        await start(of)
        if seen:
            assert of._process is not None
            of._process.kill()
            await until(lambda: of._sock is None)

    monkeypatch.setattr(dictation.Dictation, "begin", killed)
    monkeypatch.setattr(dictation.Dictation, "start", started)
    async with await opened(home) as log:
        assert log._dictation is None
        [[first]] = [await one for one in waiting]
        made = [first.event_id, *await crowd(log, 40)]
    assert await there(home) == set(made)


async def test_a_listener_that_fails_holds_up_no_row(home: Path) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fails(event: object) -> None:
        raise ValueError("not so")

    try:
        async with await opened(home) as log:
            log._listeners.append(fails)
            with anyio.fail_after(60):
                assert len(await crowd(log, 100)) == 100
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert {str(context["exception"]) for context in told} == {"not so"}


async def test_rows_that_cannot_be_made_hold_up_neither_others_nor_the_end(home: Path) -> None:
    log = await opened(home)
    made = await crowd(log, 3)

    def fails() -> int:
        raise ValueError("no time")

    log._now_ms = fails
    found = await asyncio.gather(*[row(log, n) for n in range(scribe.CROWD)], return_exceptions=True)
    assert {str(one) for one in found} == {"no time"}
    with anyio.fail_after(60):
        await log.close()
    assert await there(home) == set(made)


_DAEMON = """
import sys
from pathlib import Path
import anyio
sys.path.insert(0, sys.argv[1])
from tests.unit.covenant.stores import test_audit_scribe as kit

async def write(log, name):
    n = 0
    while True:
        print(await kit.row(log, f"{name} {n}"), flush=True)
        n += 1

async def main():
    log = await kit.opened(Path(sys.argv[2]))
    print(kit.process(log).pid, flush=True)
    async with anyio.create_task_group() as group:
        for name in range(48):
            group.start_soon(write, log, name)

anyio.run(main)
"""


@pytest.mark.parametrize("which", ["daemon", "both", "hanging"])
async def test_a_daemon_that_is_killed_loses_nothing_that_it_acknowledged(home: Path, which: str) -> None:
    root = str(Path(__file__).resolve().parents[4])
    command = [sys.executable, "-c", _DAEMON, root, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        theirs = int(daemon.stdout.readline())
        acknowledged = {daemon.stdout.readline().decode().strip() for _ in range(200)}
        held = os.pidfd_open(theirs)
        try:
            if which == "hanging":
                signal.pidfd_send_signal(held, signal.SIGSTOP)
            daemon.kill()
            if which == "both":
                signal.pidfd_send_signal(held, signal.SIGKILL)
            *whole, _ = daemon.stdout.read().decode().split("\n")
            acknowledged |= set(whole)
            opening = asyncio.ensure_future(there(home))
            if which == "hanging":
                # Nobody has the log while it may still write.
                with pytest.raises(TimeoutError):
                    with anyio.fail_after(0.2):
                        await asyncio.shield(opening)
                signal.pidfd_send_signal(held, signal.SIGCONT)
            assert acknowledged <= await opening
        finally:
            os.close(held)
    assert offline(home).valid


# What is said ------------------------------------------------------------------------------------------------------


class Given:
    """A log whose other side is a test, and the scribe that has it in a thread."""

    def __init__(self, home: Path) -> None:
        self.of = files.Files(places.Places.open(home))
        self.sock, self._theirs = socket.socketpair()
        self.sock.settimeout(60)
        self.raised: BaseException | None = None
        handed = (self.of.hand(), self.of.key)
        self._scribe = scribe.Scribe(self._theirs, files.Files(self.of.at, handed))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._scribe.serve()
        except BaseException as e:
            self.raised = e
        finally:
            self._theirs.close()

    def said(self) -> list[frames.Frame]:
        incoming, found = frames.Incoming(), []
        while data := self.sock.recv(1 << 20):
            incoming.feed(data)
        while frame := incoming.take():
            found.append(frame)
        return found


@contextmanager
def given(home: Path) -> Iterator[Given]:
    one = Given(home)
    try:
        yield one
    finally:
        one.sock.close()
        one.thread.join(60)
        one.of.close(settled=False)
        one.of.at.close()


def rows(count: int, kind: int = frames.LAST) -> bytes:
    ids = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(count)]
    lines = events.lines(ids, 7, [BODY] * count)
    made = [ledger.Row(line, event_id, 7) for line, event_id in zip(lines, ids, strict=True)]
    return frames.frame(kind, 7, frames.rows(made))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        frames.frame(0),
        frames.frame(frames.GONE + 1),
        frames.frame(frames.HELLO, 0, b"{}"),
        frames.frame(frames.DONE, 1),
        frames.frame(frames.LAST, 7, b"no row\n"),
        frames.frame(frames.LAST, 7, rows(1)[13:-1]),
        frames.frame(frames.LAST, 7, rows(2)[13:-1] + b"x"),
        frames.frame(frames.LAST, 7, rows(2)[13:].replace(b"\n", b" ", 1)),
        frames.frame(frames.LAST, 7, b"\xff\xff\xff\xff" + rows(1)[17:]),
        frames.frame(frames.LAST, 7, rows(1)[13:17] + b"\x01\x00\x00\x00" + rows(1)[21:]),
        frames.frame(frames.LAST, 7, rows(1)[13:] + b"\n"),
    ],
)
def test_what_is_no_frame_of_ours_ends_the_scribe_and_writes_nothing(home: Path, garbage: bytes) -> None:
    with given(home) as one:
        one.sock.sendall(garbage)
        assert [frame[0] for frame in one.said()] == [frames.FAILED]
        assert isinstance(one.raised, errors.LedgerError)
    assert (home / "audit" / "events.jsonl").stat().st_size == 0


@pytest.mark.parametrize("end", [1, 12, 13, 40, -1])
def test_what_came_half_is_never_written(home: Path, end: int) -> None:
    with given(home) as one:
        one.sock.sendall(rows(2) + rows(3)[:end])
        assert one.sock.recv(13)
        one.sock.shutdown(socket.SHUT_WR)
        one.thread.join(60)
        assert one.raised is None
    assert len((home / "audit" / "events.jsonl").read_bytes().splitlines()) == 2


def test_frames_come_out_whole_in_whatever_pieces_they_came_in() -> None:
    sent = [(frames.ROWS, 2**64 - 1, b"a" * 70), (frames.LAST, 0, b""), (frames.BYE, 7, b"\n" * 3)]
    stream = b"".join(frames.frame(*one) for one in sent)
    for size in range(1, len(stream) + 1):
        incoming, found = frames.Incoming(), []
        for at in range(0, len(stream), size):
            incoming.feed(stream[at : at + size])
            while frame := incoming.take():
                found.append(frame)
        assert found == sent


def test_rows_without_an_end_wait_for_it(home: Path) -> None:
    with given(home) as one:
        one.sock.sendall(rows(3, frames.ROWS))
        one.sock.sendall(rows(2, frames.LAST) + frames.frame(frames.BYE))
        said = one.said()
        assert [(kind, number) for kind, number, _ in said] == [(frames.DONE, 2), (frames.GONE, 0)]
        handed = frames.members(said[-1][2], head=str, before=str, end=int)
        head = ledger.read_signed_head(handed["head"].encode(), one.of.key.public_key())
        assert head is not None
        assert head.count == 5
    assert offline(home).valid


def test_a_sync_that_fails_is_told_and_nothing_is_written_after_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with given(home) as one:

        def sync(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fdatasync", sync)
        one.sock.sendall(rows(1) + rows(1))
        [(kind, _, body)] = one.said()
        assert (kind, json.loads(body)) == (frames.FAILED, {"reason": os.strerror(errno.EIO)})
        monkeypatch.undo()


async def test_a_scribe_that_says_what_it_cannot_know_ends_the_log(home: Path) -> None:
    log = await opened(home)
    await row(log, 1)
    assert log._dictation is not None
    log._dictation._incoming.feed(frames.frame(frames.DONE, 5, b"{}"))
    pending = asyncio.ensure_future(row(log, 2))
    with pytest.raises(errors.StoreError, match="do not understand each other"):
        await pending
    await log.close()
    assert len(await there(home)) >= 1


def test_a_head_of_another_key_is_not_taken_back(home: Path) -> None:
    with given(home) as one:
        other = Ed25519PrivateKey.generate()
        signed = ledger.signed_head(ledger.Head(), other)
        with pytest.raises(errors.LedgerError, match="do not verify"):
            one.of.taken_back(files.Handed(one.of.fds, signed, signed, 0))
        one.of.acknowledged(signed)
        with pytest.raises(errors.LedgerError, match="does not verify"):
            assert one.of.head.count == 0

"""The supervisor's log: durable, one writer at a time, and whole after a crash at any byte."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify
from sandbox.audit import log as store
from sandbox.kernel import libc

ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


def opened(state: Path) -> store.Ledger:
    return store.Ledger.open(state / "audit", head=state / "audit-head" / "head.json")


def write(log: store.Ledger, reason: str = "", now_ms: int = 1) -> str:
    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "s", "reason": reason}
    return log.append("run_state", fields, issuer=ISSUER, now_ms=now_ms)


def filled(state: Path, count: int) -> list[str]:
    with opened(state) as log:
        return [write(log, f"{i}") for i in range(count)]


def paths(state: Path) -> tuple[Path, Path, Path]:
    return state / "audit" / store.EVENTS, state / "audit" / store.CHAIN, state / "audit-head" / "head.json"


def report(state: Path) -> verify.Report:
    events, chain, head = (path.read_bytes() for path in paths(state))
    key = audit_log_chain.read_public_key((state / "audit-head" / store.PUBLIC_KEY).read_bytes())
    return verify.verify(events, chain, head, key)


def ids(state: Path) -> list[str]:
    return [json.loads(line)["id"] for line in paths(state)[0].read_bytes().splitlines()]


def restore(state: Path, contents: tuple[bytes, ...]) -> None:
    for path, content in zip(paths(state), contents, strict=True):
        path.write_bytes(content)
    for left in (state / "audit").glob("*.aside-*"):
        left.unlink()


def test_what_was_appended_is_there_verifies_and_is_private(state: Path) -> None:
    made = filled(state, 5)
    assert ids(state) == made
    assert report(state).valid
    assert report(state).events == 5
    for path in (*paths(state), state / "audit-head" / store.KEY, state / "audit-head" / store.PUBLIC_KEY):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (state / "audit", state / "audit-head"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_reopening_goes_on_with_same_key_and_chain(state: Path) -> None:
    made = filled(state, 3) + filled(state, 2)
    assert ids(state) == made
    assert report(state).valid


def test_given_key_signs_and_no_key_file_is_made(state: Path) -> None:
    key = Ed25519PrivateKey.generate()
    with store.Ledger.open(state / "audit", key=key, head=state / "audit-head" / "head.json") as log:
        write(log)
    assert report(state).valid
    assert not (state / "audit-head" / store.KEY).exists()
    with pytest.raises(errors.LedgerError, match="public key"):
        store.Ledger.open(state / "audit", key=Ed25519PrivateKey.generate(), head=state / "audit-head" / "head.json")


def test_append_reads_no_more_for_long_log(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(state, 200)
    read: list[int] = []
    real = os.pread

    def counted(fd: int, size: int, at: int) -> bytes:
        read.append(size)
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", counted)
    with opened(state) as log:
        opening = sum(read)
        read.clear()
        write(log)
    assert opening < paths(state)[0].stat().st_size
    assert sum(read) == 2 * audit_log_chain.HEAD_BYTES


def test_event_refused_leaves_log_usable(state: Path) -> None:
    with opened(state) as log:
        with pytest.raises(errors.EventError):
            log.append("run_state", {}, issuer=ISSUER, now_ms=1)
        write(log)
    assert report(state).events == 1


# --- crashes ----------------------------------------------------------------------------------------------


def crash_states(before: tuple[bytes, ...], after: tuple[bytes, ...]) -> Iterator[tuple[tuple[bytes, ...], int]]:
    """Every state that a crash between two acknowledged appends can leave, and how many records it must keep.

    The events file and the chain file grow byte by byte in order; also the chain alone, since without a sync
    between two writes either may reach the disk first; then the head's slot byte by byte.
    """
    for size in range(len(before[0]), len(after[0]) + 1):
        yield (after[0][:size], before[1], before[2]), 0
    for size in range(len(before[1]), len(after[1]) + 1):
        yield (after[0], after[1][:size], before[2]), 0
        yield (before[0], after[1][:size], before[2]), 0
    start = next(i for i in range(len(after[2])) if after[2][i] != before[2][i])
    start -= start % audit_log_chain.SLOT_BYTES
    for size in [*range(700), 1024, 4095, 4096]:
        at = start + size
        head = after[2][:at] + before[2][at:]
        yield (after[0], after[1], head), -1


@pytest.mark.usefixtures("played")
def test_crash_at_any_byte_loses_nothing_acknowledged(state: Path) -> None:
    made = filled(state, 3)
    before = tuple(path.read_bytes() for path in paths(state))
    last = filled(state, 1)
    after = tuple(path.read_bytes() for path in paths(state))
    seen = 0
    for contents, kept in crash_states(before, after):
        restore(state, contents)
        with opened(state) as log:
            # Before the head names it the record is set aside; a whole head keeps it; a torn one may do either.
            expected = made if log.count == 3 else made + last
            assert log.count == 3 or kept == -1
            assert bool(log.recovered) == (log.count == 3 and contents[:2] != before[:2])
            new = write(log, "after the crash")
        assert ids(state) == [*expected, new]
        assert report(state).valid
        if contents[0] != before[0] and len(expected) == 3:
            (aside,) = (state / "audit").glob(f"{store.EVENTS}.aside-3-*")
            assert aside.read_bytes() == contents[0][len(before[0]) :]
            assert stat.S_IMODE(aside.stat().st_mode) == 0o600
        seen += 1
    assert seen > 1000


def write_all(log: store.Ledger, count: int) -> list[str]:
    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "s", "reason": "together"}
    return log.append_all([store.Record("run_state", fields, n) for n in range(count)], issuer=ISSUER)


@pytest.mark.parametrize("count", [1, 2, 3, 5, store.MOST_RECORDS])
@pytest.mark.parametrize("held", [0, 3, 4])
def test_records_of_one_write_are_as_if_written_one_by_one(state: Path, held: int, count: int) -> None:
    made = filled(state, held)
    with opened(state) as log:
        made += write_all(log, count)
        assert log.count == held + count
        made.append(write(log))
        made += write_all(log, count)
    with opened(state) as log:
        made.append(write(log))
        assert not log.recovered
    assert ids(state) == made
    assert report(state).valid
    assert report(state).notes == ()


def test_write_of_none_or_too_many_is_refused_before_anything(state: Path) -> None:
    with opened(state) as log:
        for count in (0, store.MOST_RECORDS + 1):
            with pytest.raises(errors.EventError):
                write_all(log, count)
        write(log)
    assert report(state).events == 1


def torn_writes(before: tuple[bytes, ...], after: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    """A crash in one write of several records leaves a prefix: every 29th byte, and each one around the line ends."""
    ends = {
        at + near for raw in after[:2] for at in range(len(raw)) if raw[at : at + 1] == b"\n" for near in (-1, 0, 1)
    }
    for size in range(len(before[0]), len(after[0]) + 1):
        if size % 29 == 0 or size in ends:
            yield (after[0][:size], before[1], before[2])
    for size in range(len(before[1]), len(after[1]) + 1):
        if size % 29 == 0 or size in ends:
            yield (after[0], after[1][:size], before[2])
            yield (before[0], after[1][:size], before[2])
    turn = 0  # the third record's head stands in the second slot, so that the first is written first
    half = (
        before[2][:turn]
        + after[2][turn : turn + audit_log_chain.SLOT_BYTES]
        + before[2][turn + audit_log_chain.SLOT_BYTES :]
    )
    for old, new in ((before[2], half), (half, after[2])):
        at = (
            next((i for i in range(len(new)) if new[i] != old[i]), 0)
            // audit_log_chain.SLOT_BYTES
            * audit_log_chain.SLOT_BYTES
        )
        for size in (*range(0, 700, 50), 4095, 4096):
            yield (after[0], after[1], old[:at] + new[at : at + size] + old[at + size :])


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("count", [2, 3])
def test_crash_in_write_of_several_keeps_all_of_it_or_nothing_and_all_before(state: Path, count: int) -> None:
    made = filled(state, 3)
    before = tuple(path.read_bytes() for path in paths(state))
    with opened(state) as log:
        last = write_all(log, count)
    after = tuple(path.read_bytes() for path in paths(state))
    kept = set()
    for contents in torn_writes(before, after):
        restore(state, contents)
        with opened(state) as log:
            expected = [*made, *last][: log.count]
            kept.add(log.count)
            new = write(log, "after the crash")
        assert ids(state) == [*expected, new]
        assert report(state).valid
    assert kept == {3, 3 + count}


def test_more_than_one_write_beyond_head_is_refused(state: Path) -> None:
    """A head that was put back over several acknowledged writes, each of several records or of one."""
    head = paths(state)[2]
    filled(state, 1)
    old = head.read_bytes()
    log = opened(state)
    for writes in ([3, 1], [1, 3], [2, 2], [1, 1]):
        held = [path.read_bytes() for path in paths(state)]
        for count in writes:
            write_all(log, count)
        log.close()
        head.write_bytes(old)
        with pytest.raises(errors.LedgerError, match="after the signed head that no writer of ours leaves"):
            opened(state)
        restore(state, (held[0], held[1], held[2]))
        log = opened(state)
    log.close()


def test_what_is_beyond_head_is_never_signed_however_many_lines(state: Path) -> None:
    made = filled(state, 1)
    before = tuple(path.read_bytes() for path in paths(state))
    with opened(state) as log:
        write_all(log, 4)
    events, chain, _ = (path.read_bytes() for path in paths(state))
    restore(state, (events, chain, before[2]))
    with opened(state) as log:
        assert len(log.recovered) == 2
        made.append(write(log))
    assert ids(state) == made
    assert report(state).valid


@pytest.mark.parametrize("which", [0, 1], ids=["events", "chain"])
def test_file_shorter_than_head_says_is_refused_at_every_byte(state: Path, which: int) -> None:
    filled(state, 3)
    whole = tuple(path.read_bytes() for path in paths(state))
    for size in range(len(whole[which]) - 400, len(whole[which])):
        paths(state)[which].write_bytes(whole[which][:size])
        with pytest.raises(errors.LedgerError, match="shorter than its signed head"):
            opened(state)
        assert not report(state).valid
    restore(state, whole)
    opened(state).close()


def test_crash_while_log_is_made_does_not_stop_next_start(state: Path) -> None:
    opened(state).close()
    names = [*paths(state), state / "audit-head" / store.PUBLIC_KEY, state / "audit-head" / store.KEY]
    for gone in ([3], [2, 3], [2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]):
        for i in gone:
            names[i].unlink(missing_ok=True)
        (state / "audit-head" / ".head.json.new").write_bytes(b"torn")
        with opened(state) as log:
            assert log.count == 0
        names[1].touch()


@pytest.mark.parametrize("without", [[2], [2, 4]], ids=["head", "head and key"])
def test_log_that_was_wiped_is_not_begun_anew(state: Path, without: list[int]) -> None:
    # The head, the records and even the key are gone: the public key still says that there was a log.
    with opened(state) as log:
        write(log)
    names = [*paths(state), state / "audit-head" / store.PUBLIC_KEY, state / "audit-head" / store.KEY]
    names[0].write_bytes(b"")
    names[1].write_bytes(b"")
    for i in without:
        names[i].unlink()
    for _ in range(2):
        with pytest.raises(errors.LedgerError, match="public key is there and its head is missing"):
            opened(state)


def test_kill_9_at_any_time_loses_nothing_acknowledged(state: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sandbox.audit.log import Ledger\n"
        "s = Path(sys.argv[1]); i = 0\n"
        "issuer = {'display': 'operator@local', 'pubkey': '4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw'}\n"
        "with Ledger.open(s / 'audit', head=s / 'audit-head' / 'head.json') as log:\n"
        "    while True:\n"
        "        f = {'run_id': 'r', 'agent_id': 'a', 'operator': None, 'state': 's', 'reason': 'x' * (i % 900)}\n"
        "        print(log.append('run_state', f, issuer=issuer, now_ms=i), flush=True); i += 1\n"
    )
    acknowledged: list[str] = []
    for round_ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(state)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert child.stdout is not None
        with child, child.stdout:
            acknowledged.append(child.stdout.readline().strip())
            time.sleep(0.01 * round_)
            os.kill(child.pid, signal.SIGKILL)
            acknowledged += [line.strip() for line in child.stdout if line.endswith("\n")]
    opened(state).close()
    kept = ids(state)
    assert [i for i in kept if i in set(acknowledged)] == acknowledged
    # At most the one whose acknowledgement had not reached us yet, a round.
    assert len(kept) - len(acknowledged) <= 6
    assert report(state).valid


def fails(error: int, *, on: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The n-th call of an os function fails."""
    real, calls = getattr(os, name), []

    def call(*args: object) -> object:
        calls.append(args)
        if len(calls) == on:
            raise OSError(error, os.strerror(error))
        return real(*args)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("name", "on", "error"),
    [
        ("write", 1, errno.ENOSPC),
        ("write", 2, errno.ENOSPC),
        ("fdatasync", 1, errno.EIO),
        ("fdatasync", 2, errno.EIO),
        ("pwritev", 1, errno.EIO),
    ],
)
def test_failed_write_raises_and_log_takes_no_more(
    state: Path, monkeypatch: pytest.MonkeyPatch, name: str, on: int, error: int
) -> None:
    made = filled(state, 2)
    log = opened(state)
    with monkeypatch.context() as patch:
        fails(error, on=on, monkeypatch=patch, name=name)
        with pytest.raises(errors.LedgerError, match="could not be written"):
            write(log)
    for _ in range(2):
        with pytest.raises(errors.LedgerError, match="takes no more records"):
            write(log)
    log.close()
    with opened(state) as log:
        made_after = write(log)
    assert [i for i in ids(state) if i in {*made, made_after}] == [*made, made_after]
    assert report(state).valid


def test_disk_really_full_raises(state: Path) -> None:
    """RLIMIT_FSIZE stands for a full disk: the write is cut short by the kernel, not by a double."""
    made = filled(state, 2)
    program = (
        "import resource, signal, sys; from pathlib import Path; from sandbox.audit.log import Ledger\n"
        "from policy import errors\n"
        "s = Path(sys.argv[1]); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "issuer = {'display': 'operator@local', 'pubkey': '4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw'}\n"
        "f = {'run_id': 'r', 'agent_id': 'a', 'operator': None, 'state': 's', 'reason': 'x' * 20000}\n"
        "log = Ledger.open(s / 'audit', head=s / 'audit-head' / 'head.json')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "try: log.append('run_state', f, issuer=issuer, now_ms=1)\n"
        "except errors.LedgerError as e: sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(state)], cwd=ROOT).returncode == 7
    assert paths(state)[0].stat().st_size == 9000
    with opened(state) as log:
        assert log.recovered
        made.append(write(log))
    assert ids(state) == made
    assert report(state).valid


# --- tampering seen at open ---------------------------------------------------------------------------------


def test_head_put_back_is_noticed_by_running_writer_and_older_copy_cannot_open(state: Path) -> None:
    head = paths(state)[2]
    filled(state, 1)
    old = head.read_bytes()
    log = opened(state)
    for _ in range(3):
        write(log)
    head.write_bytes(old)
    with pytest.raises(errors.LedgerError, match="went back from 4 to 1"):
        write(log)
    log.close()
    with pytest.raises(errors.LedgerError, match="after the signed head that no writer of ours leaves"):
        opened(state)
    assert not report(state).valid


def test_forged_record_is_never_signed_by_next_start(state: Path) -> None:
    made = filled(state, 2)
    events, chain, _ = paths(state)
    forged = events.read_bytes().splitlines()[0].replace(b'"reason":"0"', b'"reason":"forged"')
    events.write_bytes(events.read_bytes() + forged + b"\n")
    assert not report(state).valid
    with opened(state) as log:
        made.append(write(log))
    assert ids(state) == made
    assert b"forged" not in chain.read_bytes() + events.read_bytes()


def test_changed_last_record_stops_next_start(state: Path) -> None:
    filled(state, 3)
    events = paths(state)[0]
    events.write_bytes(events.read_bytes().replace(b'"reason":"2"', b'"reason":"9"'))
    with pytest.raises(errors.LedgerError, match="not the one that the head signs"):
        opened(state)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("audit-head/head.json", "its head is missing"),
        ("audit-head/ledger.key", "key is missing"),
        ("audit/events.jsonl", "shorter than its signed head"),
        ("audit/events.chain.jsonl", "shorter than its signed head"),
    ],
)
def test_file_gone_stops_next_start(state: Path, gone: str, message: str) -> None:
    filled(state, 2)
    (state / gone).unlink()
    with pytest.raises(errors.LedgerError, match=message) as caught:
        opened(state)
    assert "covenant audit verify" in caught.value.hint


def test_file_replaced_while_log_is_open_is_noticed(state: Path) -> None:
    for path in paths(state):
        log = opened(state)
        write(log)
        copy = path.with_suffix(".copy")
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        copy.rename(path)
        with pytest.raises(errors.LedgerError, match="was replaced while"):
            write(log)
        log.close()


@pytest.mark.parametrize(
    "name", ["audit/events.jsonl", "audit/events.chain.jsonl", "audit-head/head.json", "audit-head/ledger.key"]
)
def test_symlinks_hard_links_and_open_modes_are_refused(state: Path, name: str) -> None:
    filled(state, 1)
    path = state / name
    opened(state).close()  # the control

    path.chmod(0o640)
    with pytest.raises(errors.LedgerError, match="not ours alone") as raised:
        opened(state)
    assert raised.value.hint == f"chmod 0600 {path}"
    subprocess.run(raised.value.hint.split(), check=True)
    opened(state).close()

    os.link(path, state / "second")
    with pytest.raises(errors.LedgerError, match="one name"):
        opened(state)
    (state / "second").unlink()
    opened(state).close()

    path.rename(state / "elsewhere")
    path.symlink_to(state / "elsewhere")
    with pytest.raises(errors.LedgerError):
        opened(state)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(errors.LedgerError):
        opened(state)


@pytest.mark.parametrize("name", ["audit", "audit-head"])
def test_directory_symlink_or_open_to_others_is_refused(state: Path, name: str) -> None:
    filled(state, 1)
    (state / name).chmod(0o750)
    with pytest.raises(errors.LedgerError, match="not ours alone"):
        opened(state)
    (state / name).chmod(0o700)
    (state / name).rename(state / "real")
    (state / name).symlink_to(state / "real")
    with pytest.raises(errors.LedgerError):
        opened(state)


# --- more than one writer -----------------------------------------------------------------------------------


def test_two_writers_take_turns(state: Path) -> None:
    with opened(state) as one, opened(state) as two:
        made = [write(log, f"{i}") for i in range(10) for log in (one, two)]
    assert ids(state) == made
    assert report(state).valid


def test_what_is_done_meanwhile_is_done_between_write_and_its_syncs(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def saying(word: str, act: Callable[[int], None]) -> Callable[[int], None]:
        def said_then_done(fd: int) -> None:
            said.append(word)
            act(fd)

        return said_then_done

    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "s", "reason": ""}
    with opened(state) as log:
        monkeypatch.setattr(os, "fdatasync", saying("sync", os.fdatasync))
        monkeypatch.setattr(libc, "start_writing", saying("written", libc.start_writing))
        record = store.Record("run_state", fields, 1)
        log.append_all([record], issuer=ISSUER, meanwhile=lambda: said.append("meanwhile"))
    assert said == ["written"] * 2 + ["meanwhile"] + ["sync"] * 2


def test_threads_and_logs_at_once(state: Path) -> None:
    made: list[str] = []
    with opened(state) as one, opened(state) as two:
        threads = [
            threading.Thread(target=lambda log=log: made.extend(write(log) for _ in range(25)))
            for log in (one, two, one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(ids(state)) == sorted(made)
    assert report(state).valid
    assert report(state).events == 100


def test_writer_that_dies_in_its_turn_is_cleared_up_by_other(state: Path) -> None:
    with opened(state) as log:
        made = [write(log)]
        events = paths(state)[0]
        events.write_bytes(events.read_bytes() + b'{"id":"torn')
        made.append(write(log))
        assert "set aside" in log.recovered[0]
    assert ids(state) == made
    assert report(state).valid


def test_lock_never_released_is_error_after_bounded_wait(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(state)
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    with paths(state)[0].open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(errors.LedgerError, match="another process held the audit log"):
            write(log)
        with pytest.raises(errors.LedgerError, match="another process held"):
            opened(state)
    log.close()
    with opened(state) as log:
        write(log)


def test_closed_log_refuses(state: Path) -> None:
    log = opened(state)
    log.close()
    with pytest.raises(errors.LedgerError, match="it was closed"):
        write(log)


def test_no_terminal_stops_whoever_writes(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process that holds the writers' lock makes every run wait. Under sudo an ordinary user can stop it."""
    stopping = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    seen: list[set[int]] = []
    with opened(state) as log:
        done = log._write

        def seeing(*args: Any, **named: Any) -> None:
            seen.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
            done(*args, **named)

        monkeypatch.setattr(log, "_write", seeing)
        write(log)
    assert stopping <= seen[0]
    assert not stopping & signal.pthread_sigmask(signal.SIG_BLOCK, ())

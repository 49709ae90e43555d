"""Read the audit logs of a home and of a state, without the daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from policy.audit_log import chain as audit_log_chain


_LOCK_SECONDS = 10.0
_TRIES = 10
_TOGETHER = "put back the newest copies of audit and audit-head together, or keep both as evidence"
_NAMES = ("events.jsonl", "events.chain.jsonl")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


# What it takes can be printed again as JSON: no NaN, and no number that becomes infinite.
NUMBERS_ONLY = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class LogBytes:
    """The contents of one log, read under the writers' lock: both files and the head as the next opening leaves them.

    Where that refuses them they are as they are, and ``refused`` is the reason or the verification finds it.
    """

    name: str
    path: Path
    events: bytes
    chain: bytes
    head: bytes | None
    public_key: bytes | None
    set_aside: tuple[str, ...]
    checkpoints: bytes | None = None
    # Messages about bytes beyond that in the files, which the next start sets aside or refuses.
    unacknowledged: tuple[str, ...] = ()
    refused: str | None = None


def read_logs() -> list[LogBytes]:
    """Read every existing log.

    Raises:
        errors.LedgerError: there is none, or one cannot be read.
    """
    there = places()
    logs = [log for name, path in there if (log := _read(name, path)) is not None]
    if not logs:
        looked = " or ".join(f"`{path}`" for _, path in there)
        raise errors.LedgerError(
            f"no log: there is no audit log at {looked}",
            hint=_installed() or "set COVENANT_HOME or COVENANT_STATE; a run makes the log",
        )
    return logs


def _installed() -> str:
    """Return the hint where the installed services have logs. Only root can see them."""
    from sandbox.serve.api import paths

    there = (("COVENANT_STATE", paths.SYSTEM_STATE), ("COVENANT_HOME", paths.SYSTEM_HOME))
    named = [f"{name}={place}" for name, place in there if os.path.exists(f"{place}/audit")]
    return "export " + " ".join(named) if named else ""


def read_log(name: str) -> LogBytes:
    """Read the log of the daemon or of the supervisor.

    Raises:
        errors.LedgerError: it has none here, or one cannot be read.
    """
    log = next((log for log in read_logs() if log.name == name), None)
    if log is None:
        raise errors.LedgerError(f"the {name} has no log here", hint="set COVENANT_HOME")
    return log


def supervisor_events(*containing: bytes) -> Iterator[dict[str, Any]]:
    """Yield the kind objects of the supervisor's rows, oldest first, from lines with any of these bytes.

    Without the supervisor's log, which is root's, these are the daemon's copies of its rows. In a copy the quotation
    marks of ``containing`` would be escaped. Lines that are no row are skipped.

    Raises:
        errors.LedgerError: there is no log, or one cannot be read.
    """
    logs = {log.name: log for log in read_logs()}
    is_copy = "supervisor" not in logs
    for line in logs["daemon" if is_copy else "supervisor"].events.split(b"\n"):
        if not any(word in line for word in containing):
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        kind = event.get("kind") if isinstance(event, dict) else None
        if isinstance(kind, dict) and is_copy:
            original = copied(kind)
            kind = None if original is None else original["kind"]
        if isinstance(kind, dict):
            yield kind


def copied(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The row of the supervisor's log that a row of the daemon's is a copy of; None of any other, and of one whose line
    was too long to be copied or holds another copy, which none of ours does."""
    if fields.get("type") != "supervisor_row" or not isinstance(fields.get("line"), str):
        return None
    try:
        row = NUMBERS_ONLY.decode(fields["line"])
    except (ValueError, RecursionError):
        return None
    kind = row.get("kind") if isinstance(row, dict) else None
    return row if isinstance(kind, dict) and kind.get("type") != "supervisor_row" else None


def places() -> list[tuple[str, Path]]:
    """Return the possible places of logs. Creates no directory."""
    home = os.environ.get("COVENANT_HOME")
    if not home and os.environ.get("SUDO_UID"):
        common.home()  # raises, with its hint
    base = Path(home).absolute() if home else Path.home() / ".covenant"
    state = os.environ.get("COVENANT_STATE")
    return [
        ("supervisor", (Path(state).absolute() if state else base / "supervisor") / "audit"),
        ("daemon", base / "audit"),
    ]


def _read(name: str, path: Path) -> LogBytes | None:
    try:
        return _snapshot(name, path)
    except PermissionError as e:
        raise errors.LedgerError(
            f"the {name} log cannot be read: {e.strerror}", hint="run as its owner", where=str(path)
        ) from e
    except OSError as e:
        raise errors.LedgerError(f"the {name} log cannot be read: {e.strerror}", where=str(path)) from e


def _snapshot(name: str, path: Path) -> LogBytes | None:
    from policy.audit_log import chain as audit_log_chain
    from policy.audit_log import write_ahead
    from sandbox.storage import atomic_file

    head_folder = path.with_name("audit-head")
    with contextlib.ExitStack() as stack:
        # A reader stopped while it holds the lock would block every writer.
        with atomic_file.unstopped():
            log = _locked(path, stack)
            chain = _open(path / _NAMES[1])
            if chain is not None:
                stack.callback(os.close, chain)
            sizes = [os.fstat(fd).st_size if fd is not None else None for fd in (log, chain)]
            head, key = _content(head_folder / "head.json"), _content(head_folder / "ledger.pub")
            # An old version of the supervisor's log had this file as well; it no longer has a meaning.
            pending = _content(head_folder / "pending") if name == "daemon" else None
            # The files of a cut that the next opening completes.
            new = [_open(path / (one + write_ahead.NEW)) for one in _NAMES]
            for fd in new:
                if fd is not None:
                    stack.callback(os.close, fd)
            checkpoints = _content(path / "checkpoints.jsonl")
            if all(content is None for content in (*sizes, head, key)):
                return None
            aside = sorted(entry for entry in os.listdir(path) if ".aside-" in entry) if path.is_dir() else []
            signed = public = None
            if key is not None:
                with contextlib.suppress(errors.LedgerError):  # an invalid key is reported by the verification
                    public = audit_log_chain.read_public_key(key)
                    signed = audit_log_chain.read_head(head or b"", public)
            ends, beyond, refused = [size or 0 for size in sizes], list[str](), None
            read = log, chain
            if log is not None and chain is not None and signed is not None and name == "supervisor":
                read = _of_a_cut(log, chain, new, signed)
                ends = [os.fstat(fd).st_size for fd in read]
                ends, beyond, refused = _acknowledged(*read, signed, ends, path)
            if log is not None:
                # INVARIANT: apart from bytes beyond the head, which the next opening removes, the files only grow, and
                # a replacement has other descriptors: so the writer need not wait longer.
                fcntl.flock(log, fcntl.LOCK_UN)
        # Not under the lock: a full file takes 0.1 s.
        found = write_ahead.replay(pending, public) if pending and public is not None else None
        is_behind = found is not None and write_ahead.is_behind(found, signed)
        files = list(zip(read, ends, strict=True))
        if found is not None and found.replaced and not is_behind:
            files = [_whole(fd) if fd is not None else old for fd, old in zip(new, files, strict=True)]
        events, entries = (_first(fd, end) for fd, end in files)
        if found is None:
            events, entries = audit_log_chain.completed(events, entries, signed)
        elif is_behind:
            refused = f"{write_ahead.BEHIND}: {_TOGETHER}"
        else:
            events, entries, head = write_ahead.caught_up(events, entries, head or b"", found)
        return LogBytes(name, path, events, entries, head, key, tuple(aside), checkpoints, tuple(beyond), refused)


def _of_a_cut(log: int, chain: int, new: Sequence[int | None], head: audit_log_chain.Head) -> tuple[int, int]:
    """Return the files of a cut that was killed behind its head, which the next opening renames; else the two given."""
    from sandbox.audit import log_cut

    made = [old if fresh is None else fresh for fresh, old in zip(new, (log, chain), strict=True)]
    return (made[0], made[1]) if log_cut.is_of(head, made[0], made[1]) else (log, chain)


def _acknowledged(
    log: int, chain: int, head: audit_log_chain.Head, sizes: list[int], path: Path
) -> tuple[list[int], list[str], str | None]:
    """Return how far both files are acknowledged, and messages about the bytes beyond.

    If the next start would refuse those bytes, returns the full sizes and the reason.
    """
    from sandbox.audit import log_files

    try:
        tails = log_files.tails(log, chain, head, path)
    except errors.LedgerError as e:
        return sizes, [], e.message
    said = [
        f"`{name}` ends in {len(tail)} bytes that were not acknowledged, which the next start sets aside"
        for name, tail in zip(_NAMES, tails, strict=True)
        if tail
    ]
    return [size - len(tail) for size, tail in zip(sizes, tails, strict=True)], said, None


def _whole(fd: int) -> tuple[int, int]:
    return fd, os.fstat(fd).st_size


def _first(fd: int | None, size: int) -> bytes:
    """Return the first ``size`` bytes of a file."""
    if fd is None:
        return b""
    with os.fdopen(os.dup(fd), "rb") as stream:
        stream.seek(0)
        return stream.read(size)


def _locked(path: Path, stack: contextlib.ExitStack) -> int | None:
    """Open the events file under the readers' lock. Retries if a cut replaced the file under its name meanwhile."""
    for _ in range(_TRIES):
        lock = _open(path / _NAMES[0])
        if lock is None:
            return None
        try:
            _shared(lock, path)
            named = os.stat(path / _NAMES[0], follow_symlinks=False)
            if os.path.samestat(os.fstat(lock), named):
                stack.callback(os.close, lock)
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise errors.LedgerError("the log was replaced while it was read, again and again", where=str(path))


def _shared(fd: int, path: Path) -> None:
    """Wait until no writer is between its three files."""
    # A blocking flock in the kernel wakes as soon as the lock is free; polling would hardly ever meet a busy daemon
    # between two writes. In a thread, because flock has no timeout.
    waiting = threading.Thread(target=fcntl.flock, args=(fd, fcntl.LOCK_SH), daemon=True)
    waiting.start()
    waiting.join(_LOCK_SECONDS)
    if waiting.is_alive():
        raise errors.LedgerError(f"a writer held the log for {_LOCK_SECONDS:.0f} seconds", where=str(path))


def _open(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise errors.LedgerError(f"`{path}` is not a regular file", where=str(path))
    return fd


def _content(path: Path) -> bytes | None:
    fd = _open(path)
    if fd is None:
        return None
    with os.fdopen(fd, "rb") as stream:
        return stream.read()

"""The last record of each run that was started: ``archive/<run_id>.json`` below COVENANT_STATE, for root alone.

What is left to ask of a run when its directory is gone: how it ended, and the end of what it wrote to stderr. Never its
intent and never its result, of which there is the hash that the log has. The oldest make room for the newest, and a
record says nothing that the log does not hold more surely: it is for looking, not for evidence.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from policy import errors, lifecycle
from policy.audit_log import events
from policy.signing import strict_json
from sandbox.storage import atomic_file

STDERR_BYTES = 8 * 1024
# So many more than there may be are let come together before the oldest go: looking for them is not for every run.
_SLACK = 64
# A record that is half written for so long is nobody's (seconds).
_HALF_SECONDS = 60
_SUFFIX = ".json"


class Record(pydantic.BaseModel):
    """One run that ended. Times in Unix milliseconds; ``stderr_bytes`` counts what was written, not what is kept."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["run_record"] = "run_record"
    run_id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f-]{36}$")]
    agent_id: str
    package: str
    operator: str | None
    issuer: str
    parent: str | None
    state: Literal["Archived"] = "Archived"
    status: Literal["ok", "failed"]
    code: str | None
    message: str | None
    policy_digest: str | None
    started_ms: int
    ended_ms: int
    exit_status: int | None
    result_hash_hex: str | None
    denials: int
    stderr: str
    stderr_bytes: int

    def error(self) -> errors.CovenantError | None:
        """What the run ended with, None when it was answered."""
        if self.status == "ok":
            return None
        return errors.restored({"code": self.code, "message": self.message or f"the run ended with `{self.code}`"})


def tail(stderr: str) -> str:
    """The part of a run's stderr that its record keeps: the end, from the beginning of a line where there is one."""
    if len(stderr) <= STDERR_BYTES:
        return stderr
    end = stderr[-STDERR_BYTES:]
    return end.partition("\n")[2] or end


def store(state: Path, record: Record) -> None:
    """Put the record in its place, durably, and let the oldest go when there are too many.

    Raises:
        errors.StateError: it cannot be written.
    """
    try:
        with contextlib.ExitStack() as stack:
            directory = _open(state, stack)
            atomic_file.replace(directory, record.run_id + _SUFFIX, _fitting(record))
            # Once for both: a run whose answer somebody waits for reads the names of all before it.
            there = os.listdir(directory)
            names = [name for name in there if name.endswith(_SUFFIX)]
            if len(names) > lifecycle.ARCHIVE_RECORDS + _SLACK:
                _collect(directory, names)
            _sweep(directory, there)
    except OSError as e:
        raise errors.StateError(f"the record of the run cannot be archived: {e.strerror}", where=str(state)) from e


def read(state: Path, run_id: str) -> Record | None:
    """The record of a run; None when there is none, or none any more.

    Raises:
        errors.StateError: it is damaged.
    """
    with contextlib.ExitStack() as stack:
        directory = _open(state, stack)
        where = str(state / "archive")
        name = run_id + _SUFFIX
        raw = atomic_file.read(
            directory, name, max_bytes=lifecycle.ARCHIVE_RECORD_BYTES, where=where, error=errors.StateError
        )
    if raw is None:
        return None
    try:
        return strict_json.validate(Record, strict_json.loads(raw, max_bytes=lifecycle.ARCHIVE_RECORD_BYTES))
    except strict_json.MalformedError as e:
        raise errors.StateError(f"the record is damaged: {e}", where=f"{where}/{name}") from None


def ids(state: Path) -> list[str]:
    """The runs that have a record, the latest first."""
    with contextlib.ExitStack() as stack:
        directory = _open(state, stack)
        found = _by_age(directory, [name for name in os.listdir(directory) if name.endswith(_SUFFIX)])
    return [name.removesuffix(_SUFFIX) for name in reversed(found)]


def _open(state: Path, stack: contextlib.ExitStack) -> int:
    outer = atomic_file.open_directory(state, error=errors.StateError)
    stack.callback(os.close, outer)
    inner = atomic_file.open_subdirectory(outer, "archive", where=str(state), make=True, error=errors.StateError)
    stack.callback(os.close, inner)
    return inner


def _sweep(directory: int, there: Iterable[str]) -> None:
    """What killed writers left among the names ``there``; a living one takes milliseconds."""
    for name in there:
        if name.startswith(".") and name.endswith(".new"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime > _HALF_SECONDS:
                    os.unlink(name, dir_fd=directory)


def _fitting(record: Record) -> bytes:
    """The record as bytes, with less of its stderr where its characters take more room than they are."""
    fields = {name: _clean(value) for name, value in record.model_dump().items()}
    fields["message"] = record.message and str(fields["message"])[: events.MESSAGE_CHARACTERS]
    while len(raw := strict_json.dumps(fields) + b"\n") > lifecycle.ARCHIVE_RECORD_BYTES:
        kept = str(fields["stderr"])
        if not kept:
            raise errors.StateError("the record of the run is larger than the archive takes")
        fields["stderr"] = kept[len(kept) // 4 + 1 :]
    return raw


def _clean(value: object) -> object:
    # A file name that is no UTF-8 has surrogates, which no reader of JSON has to take.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _by_age(directory: int, names: list[str]) -> list[str]:
    aged, now_ns = [], time.time_ns()
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another has just let it go
            changed_ns = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns
            # What is of a time to come was written before the clock was put back, so before all that is not.
            aged.append((changed_ns <= now_ns, changed_ns, name))
    return [name for *_, name in sorted(aged)]


def _collect(directory: int, names: list[str]) -> None:
    aged = _by_age(directory, names)
    for name in aged[: max(0, len(aged) - lifecycle.ARCHIVE_RECORDS)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

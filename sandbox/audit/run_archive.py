"""Archive the last record of each run that was started: ``archive/<run_id>.json`` below COVENANT_STATE, root only.

A record remains after the run's directory is removed: how the run ended, the end of its stderr, and of a failed run
the end of its stdout. It never contains the intent or the result, only the result's hash, which the log has as well.
The oldest records make room for the newest. A record is for information, not for evidence: the log holds the same facts
signed.
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
STDOUT_BYTES = 8 * 1024
# The oldest records are removed only when there are this many too many, so that not every run sorts them by age.
SLACK = 64
# A temporary file of this age (seconds) has no live writer.
_HALF_SECONDS = 60
_SUFFIX = ".json"


class ArchivedRun(pydantic.BaseModel):
    """One run that ended. Times in Unix milliseconds.

    ``stderr_bytes`` and ``stdout_bytes`` count what was written, not what is kept. ``stdout`` is kept of a failed run.
    """

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
    # A record of an older version has neither.
    stdout: str = ""
    stdout_bytes: int = 0

    def error(self) -> errors.CovenantError | None:
        """Return the error that ended the run. Returns None if the run returned a result."""
        if self.status == "ok":
            return None
        return errors.restored({"code": self.code, "message": self.message or f"the run ended with `{self.code}`"})


def tail(written: str, most: int = STDERR_BYTES) -> str:
    """Return the end of a run's stderr or stdout for its record, from the beginning of a line where there is one."""
    if len(written) <= most:
        return written
    end = written[-most:]
    return end.partition("\n")[2] or end


def store(state: Path, record: ArchivedRun) -> None:
    """Store a record durably, and remove the oldest when there are too many.

    Raises:
        errors.StateError: Raised when the record cannot be written.
    """
    try:
        with contextlib.ExitStack() as stack:
            directory = _open(state, stack)
            atomic_file.replace(directory, record.run_id + _SUFFIX, _fitting(record))
            # List the directory once for both uses: a client waits for this run's result meanwhile.
            there = os.listdir(directory)
            names = [name for name in there if name.endswith(_SUFFIX)]
            if len(names) > lifecycle.ARCHIVE_RECORDS + SLACK:
                _collect(directory, names)
            _sweep(directory, there)
    except OSError as e:
        raise errors.StateError(f"the record of the run cannot be archived: {e.strerror}", where=str(state)) from e


def read(state: Path, run_id: str) -> ArchivedRun | None:
    """Return the record of a run. Returns None if there is none (any more).

    Raises:
        errors.StateError: Raised when the record is damaged.
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
        return strict_json.validate(ArchivedRun, strict_json.loads(raw, max_bytes=lifecycle.ARCHIVE_RECORD_BYTES))
    except strict_json.MalformedJsonError as e:
        raise errors.StateError(f"the record is damaged: {e}", where=f"{where}/{name}") from None


def ids(state: Path) -> list[str]:
    """Return the ids of the runs that have a record, the latest first."""
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
    """Remove temporary files of killed writers among the names ``there``. A live writer takes milliseconds."""
    for name in there:
        if name.startswith(".") and name.endswith(".new"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime > _HALF_SECONDS:
                    os.unlink(name, dir_fd=directory)


def _fitting(record: ArchivedRun) -> bytes:
    """Return the record as bytes. Its output is shortened if escaped characters make the record too large."""
    fields = {name: _clean(value) for name, value in record.model_dump().items()}
    fields["message"] = record.message and str(fields["message"])[: events.MESSAGE_CHARACTERS]
    while len(raw := strict_json.dumps(fields) + b"\n") > lifecycle.ARCHIVE_RECORD_BYTES:
        longer = max(("stderr", "stdout"), key=lambda name: len(str(fields[name])))
        kept = str(fields[longer])
        if not kept:
            raise errors.StateError("the record of the run is larger than the archive takes")
        fields[longer] = kept[len(kept) // 4 + 1 :]
    return raw


def _clean(value: object) -> object:
    # A file name that is not UTF-8 contains surrogates, which a reader of JSON may refuse.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _by_age(directory: int, names: list[str]) -> list[str]:
    aged, now_ns = [], time.time_ns()
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            changed_ns = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns
            # A time in the future means: written before the clock was set back, so before all other records.
            aged.append((changed_ns <= now_ns, changed_ns, name))
    return [name for *_, name in sorted(aged)]


def _collect(directory: int, names: list[str]) -> None:
    aged = _by_age(directory, names)
    for name in aged[: max(0, len(aged) - lifecycle.ARCHIVE_RECORDS)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

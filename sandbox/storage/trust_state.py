"""COVENANT_STATE, the state that decides about starts. Only the uid of the supervisor can write there.

    trust/root-00000001.json    every version of the trust root; the highest is the valid one
    serials/<hash>.json         the highest accepted serial of each agent id, and its payload digest
    clock.json                  the greatest time at which something was accepted, and the greatest root version
    dev/<hash>/                 the same again for each agent id that ``covenant dev`` runs
    lock                        writers take turns

``covenant dev`` signs with a local key, made for one agent id. No operator's trust root lists that key: each id has its
own state below ``dev/``, with a root that lists only that key for only that id. So ``run`` accepts no package that dev
signed, and dev's serials do not lock out packages that an operator signed before.

A damaged file is an error, never an empty state: a ratchet must not forget.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self, TypeVar

import pydantic
from msgspec import Struct

from policy import errors
from policy.signing import root as roots
from policy.signing import statement as statements
from policy.signing import strict_json, trust
from sandbox.storage import atomic_file

# The clock is written at most once a minute: setting it back revives an envelope for no longer than that,
# and a decision within the minute costs no disk write.
CLOCK_STEP_MS = 60_000

# Serials may be a day ahead as well (``trust.MAX_SERIAL_AHEAD_MS``).
AHEAD_MS = trust.AHEAD_MS

_MAX_RECORD_BYTES = 4096
_ROOT_NAME = re.compile(r"root-([0-9]{8})\.json")


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class _SerialRecord(_Closed):
    kind: Literal["covenant-serial"]
    agent_id: Annotated[str, pydantic.Field(pattern=statements.AGENT_ID_PATTERN)]
    serial: statements.TimeMs
    payload_digest: statements.Sha256


class _ClockRecord(_Closed):
    kind: Literal["covenant-clock"]
    greatest_time_ms: statements.TimeMs
    greatest_root_version: Annotated[int, pydantic.Field(ge=1, le=2**31)]


_Record = TypeVar("_Record", bound=_Closed)


class ClockAhead(Struct, frozen=True):
    """Records that a clock which was ahead has left: the greatest time, and the agents with serials of that time."""

    greatest_time_ms: int
    agents: tuple[str, ...]


# Called under the lock with the root that is about to hold: the log's line is durable before the root is.
BeforeRoot = Callable[[trust.TrustRoot], None]
BeforeClock = Callable[[ClockAhead], None]


class _MissingError(errors.StateError):
    """A directory that should be there is not."""


class State:
    """An open state directory; it answers ``trust.SerialState``. Close it, or use it as a context manager.

    Raises:
        errors.HomeError: the directory is missing, another uid's, or open to others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dir = atomic_file.open_directory(path, error=errors.HomeError)

    def close(self) -> None:
        """Close the directory."""
        if self._dir >= 0:
            os.close(self._dir)
            self._dir = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the trust root ---------------------------------------------------------------------------

    def has_root(self) -> bool:
        """Whether a trust root is installed here."""
        return self.root_version() > 0

    def began(self) -> bool:
        """Whether a trust root is here, or was about to be and is gone: nothing else stands for it then."""
        return self.has_root() or self._clock(has_root=False) is not None

    def trust_root(self, now_ms: int) -> trust.TrustRoot:
        """Return the valid trust root, checked at ``now_ms``.

        Raises:
            errors.TrustError: Raised when there is none, or it is malformed, not self-signed, or not valid now.
        """
        root = self.present_root()
        root.check_time(now_ms)
        return root

    def present_root(self) -> trust.TrustRoot:
        """Return the trust root of the highest version, even if it has expired: to show or to replace it.

        Raises:
            errors.TrustError: Raised when there is none, it is malformed or not self-signed, or a later one was
                removed.
            errors.StateError: Raised when the record of versions is damaged or gone.
        """
        record, version = self._record_and_version()
        if record is not None and version < record.greatest_root_version:
            raise _taken_away(record, self.path)
        if not version:
            raise errors.TrustError(
                "no trust root is installed", hint="covenant trust init --key NAME", where=str(self.path)
            )
        root = trust.TrustRoot.parse(self.root_bytes(version))
        if root.version != version:
            raise errors.TrustError(f"trust root {version} says that it is version {root.version}")
        return root

    def init_root(self, raw: bytes, now_ms: int, *, before: BeforeRoot | None = None) -> trust.TrustRoot:
        """Install version 1, if there is no root. Its place makes it trusted: only our uid can write here.

        ``before`` is called with the root when only the disk can still refuse it. If it raises, nothing is changed.

        Raises:
            errors.TrustError: Raised when there is a root already, or this is not a valid version 1.
        """
        root = trust.TrustRoot.load(raw, now_ms)
        if root.version != 1:
            raise errors.TrustError(f"the first trust root is version 1, not {root.version}")
        with self._locked():
            if self.root_version():
                raise errors.TrustError(
                    "a trust root is installed already",
                    hint="it is replaced by version N + 1, signed by the keys of version N",
                    where=str(self.path),
                )
            record = self._clock(has_root=False)
            if record is not None and record.greatest_root_version > 1:
                raise _taken_away(record, self.path)
            if before is not None:
                before(root)
            # INVARIANT: with a root the ratchet's files exist. A file that is missing later was removed.
            with self._directory("serials", make=True):
                pass
            self._write_clock(max(now_ms, record.greatest_time_ms if record else 0), 1)
            self._install(raw, 1)
        return root

    def replace_root(self, raw: bytes, now_ms: int, *, before: BeforeRoot | None = None) -> trust.TrustRoot:
        """Install version N + 1, signed by the thresholds of N and of N + 1; ``before`` as for ``init_root``.

        Raises:
            errors.TrustError: there is no version N, or this cannot follow it.
        """
        with self._locked():
            present = self.present_root()
            greatest_time_ms = self.greatest_time_ms()
            root = present.successor(raw, max(now_ms, greatest_time_ms))
            if before is not None:
                before(root)
            self._install(raw, root.version)
            self._write_clock(greatest_time_ms, root.version)
        return root

    # --- the ratchet ------------------------------------------------------------------------------

    def accepted(self, agent_id: str) -> trust.Accepted | None:
        """The highest accepted serial of an agent id, None when there was none. One small file is read.

        Raises:
            errors.StateError: the record is damaged.
        """
        name = _record_name(agent_id)
        with self._directory("serials", make=False) as directory:
            where = str(self.path / "serials")
            raw = atomic_file.read(directory, name, max_bytes=_MAX_RECORD_BYTES, where=where, error=errors.StateError)
        if raw is None:
            return None
        record = _parse(_SerialRecord, raw, f"{where}/{name}")
        if record.agent_id != agent_id:
            raise errors.StateError(f"the serial record of `{agent_id}` names another agent", where=where)
        return trust.Accepted(record.serial, record.payload_digest)

    def greatest_time_ms(self) -> int:
        """The greatest time at which something was accepted, to the minute.

        Raises:
            errors.StateError: the record is damaged or gone.
        """
        record = self._clock(has_root=self.has_root())
        return 0 if record is None else record.greatest_time_ms

    def still_holds(self, version: int) -> int:
        """Return ``greatest_time_ms`` if the trust root of this version is the valid one.

        Each version has its own file, which is never rewritten, so a process that has read it need not read it again.

        Raises:
            errors.TrustError: Raised when another version is valid, or a later one was removed.
            errors.StateError: Raised when the record is damaged or gone.
        """
        record, present = self._record_and_version()
        if record is not None and present < record.greatest_root_version:
            raise _taken_away(record, self.path)
        if present != version:
            raise errors.TrustError(f"trust root version {present} holds now, not {version}", where=str(self.path))
        return 0 if record is None else record.greatest_time_ms

    def time_under(self, version: int) -> int:
        """Return ``greatest_time_ms`` if no trust root after this version was ever recorded here.

        It does not check that this version is installed: a start does that under the lock (``accept``).

        Raises:
            errors.TrustError: Raised when a later version was installed.
            errors.StateError: Raised when the record is damaged or gone.
        """
        record = self._clock(has_root=True)
        assert record is not None
        if record.greatest_root_version > version:
            later = record.greatest_root_version
            raise errors.TrustError(f"trust root version {later} was installed after {version}", where=str(self.path))
        return record.greatest_time_ms

    def _record_and_version(self) -> tuple[_ClockRecord | None, int]:
        """Read the record, then the installed version.

        A version is installed before it is recorded. Read the other way round, a root that is installed in between
        would look like a removed one.
        """
        record = self._clock(has_root=False)
        version = self.root_version()
        if version and record is None:  # the first came in between, which makes the record before itself
            record = self._clock(has_root=True)
        return record, version

    def _clock(self, *, has_root: bool) -> _ClockRecord | None:
        where = str(self.path)
        raw = atomic_file.read(
            self._dir, "clock.json", max_bytes=_MAX_RECORD_BYTES, where=where, error=errors.StateError
        )
        if raw is None:
            if has_root:
                raise errors.StateError("the clock record is gone", where=f"{where}/clock.json")
            return None
        return _parse(_ClockRecord, raw, f"{where}/clock.json")

    def accept(self, trusted: trust.TrustedPackage, *, now_ms: int) -> None:
        """Record durably that this payload was accepted; called before anything of it starts.

        Under the lock the root is checked again, since its next version may revoke this payload. So is the ratchet,
        since two runs that verified at the same time must not both win.

        Raises:
            errors.TrustError: Raised when the trust root was replaced in between, or its replacement was removed.
            errors.SerialError: Raised when another payload was accepted in between.
            errors.StateError: Raised when the record is damaged or cannot be written.
        """
        statement = trusted.statement
        new = trust.Accepted(statement.serial, trusted.payload_digest)
        with self._locked():
            version, record = self.root_version(), self._clock(has_root=True)
            if record is not None and version < record.greatest_root_version:
                raise _taken_away(record, self.path)
            if trusted.root_version != version:
                raise errors.TrustError(
                    f"the package was verified under trust root version {trusted.root_version}, {version} holds now",
                    hint="run it again",
                    where=str(self.path),
                )
            last = self.accepted(statement.agent_id)
            trust.check_rollback(statement.agent_id, new.serial, new.payload_digest, last)
            try:
                if last != new:
                    self._write_serial(statement.agent_id, new)
                late = record is not None and now_ms >= record.greatest_time_ms + CLOCK_STEP_MS
                # A replacement that was killed halfway left its root, and the record of the one before.
                if record is not None and (late or record.greatest_root_version < version):
                    self._write_clock(now_ms if late else record.greatest_time_ms, version)
            except OSError as e:
                raise errors.StateError(f"the serial cannot be recorded: {e.strerror}", where=str(self.path)) from e

    def dev(self, agent_id: str) -> State:
        """The state for ``covenant dev`` of one agent id, made when it is missing. The caller closes it."""
        name = hashlib.sha256(agent_id.encode()).hexdigest()
        with self._directory("dev", make=True) as directory:
            where = str(self.path / "dev")
            os.close(atomic_file.open_subdirectory(directory, name, where=where, make=True, error=errors.HomeError))
        return State(self.path / "dev" / name)

    # --- a clock that was ahead -------------------------------------------------------------------

    def clock_ahead(self, now_ms: int) -> ClockAhead | None:
        """Return the records that are ahead of the clock, of ``covenant dev`` too; None if there are none.

        Raises:
            errors.StateError: a record is damaged.
        """
        record, late = self._clock(has_root=self.has_root()), now_ms + AHEAD_MS
        greatest = 0 if record is None else record.greatest_time_ms
        agents = [one.agent_id for one in self._serials() if one.serial > late]
        for dev in self._dev_states():
            with dev:
                if (below := dev.clock_ahead(now_ms)) is not None:
                    greatest = max(greatest, below.greatest_time_ms)
                    agents += below.agents
        return ClockAhead(greatest, tuple(sorted(set(agents)))) if greatest > late or agents else None

    def set_clock(self, now_ms: int, *, before: BeforeClock | None = None) -> ClockAhead | None:
        """Take records that are ahead of the clock back to ``now_ms``; the operator has said that it is right.

        A serial is taken back to now, so no package that was signed before now is accepted again. ``before`` is called
        under the lock with what is taken back; if it raises, nothing is changed.

        Raises:
            errors.StateError: a record is damaged or cannot be written.
        """
        with self._locked():
            ahead = self.clock_ahead(now_ms)
            if ahead is None:
                return None
            if before is not None:
                before(ahead)
            try:
                self._take_back(now_ms)
                for dev in self._dev_states():
                    with dev:
                        dev.set_clock(now_ms)
            except OSError as e:
                raise errors.StateError(f"the clock cannot be recorded: {e.strerror}", where=str(self.path)) from e
        return ahead

    def _take_back(self, now_ms: int) -> None:
        for one in self._serials():
            if one.serial > now_ms + AHEAD_MS:
                self._write_serial(one.agent_id, trust.Accepted(now_ms, one.payload_digest))
        record = self._clock(has_root=self.has_root())
        if record is not None and record.greatest_time_ms > now_ms:
            self._write_clock(now_ms, record.greatest_root_version)

    def _serials(self) -> Iterator[_SerialRecord]:
        with contextlib.suppress(_MissingError), self._directory("serials", make=False) as directory:
            where = str(self.path / "serials")
            for name in sorted(os.listdir(directory)):
                if not name.endswith(".json"):
                    continue
                raw = atomic_file.read(
                    directory, name, max_bytes=_MAX_RECORD_BYTES, where=where, error=errors.StateError
                )
                if raw is not None:
                    yield _parse(_SerialRecord, raw, f"{where}/{name}")

    def _dev_states(self) -> Iterator[State]:
        names: list[str] = []
        with contextlib.suppress(_MissingError), self._directory("dev", make=False) as directory:
            names = sorted(os.listdir(directory))
        return (State(self.path / "dev" / name) for name in names)

    # --- files ------------------------------------------------------------------------------------

    def root_version(self) -> int:
        """Return the highest installed version, 0 if there is none."""
        try:
            with self._directory("trust", make=False) as directory:
                found = [_ROOT_NAME.fullmatch(name) for name in os.listdir(directory)]
        except _MissingError:
            return 0
        return max((int(m[1]) for m in found if m), default=0)

    def root_place(self, version: int) -> Path:
        """Return the path of a version of the trust root."""
        return self.path / "trust" / _root_name(version)

    def root_bytes(self, version: int) -> bytes:
        """A version of the trust root as it was installed.

        Raises:
            errors.TrustError: it was never installed here, or its file cannot be read.
        """
        where = str(self.path / "trust")
        with self._directory("trust", make=False) as directory:
            raw = atomic_file.read(
                directory, _root_name(version), max_bytes=roots.MAX_BYTES, where=where, error=errors.TrustError
            )
        if raw is None:
            hint = "covenant trust show prints the present version; an earlier one may be where it was installed"
            raise errors.TrustError(f"trust root version {version} is not here", hint=hint, where=where)
        return raw

    def _install(self, raw: bytes, version: int) -> None:
        try:
            with self._directory("trust", make=True) as directory:
                atomic_file.create(directory, _root_name(version), raw)
        except OSError as e:
            raise errors.TrustError(f"the trust root cannot be written: {e.strerror}") from e

    def _write_serial(self, agent_id: str, new: trust.Accepted) -> None:
        record = _SerialRecord(
            kind="covenant-serial", agent_id=agent_id, serial=new.serial, payload_digest=new.payload_digest
        )
        with self._directory("serials", make=False) as directory:
            atomic_file.replace(directory, _record_name(agent_id), _encode(record))

    def _write_clock(self, now_ms: int, root_version: int) -> None:
        record = _ClockRecord(kind="covenant-clock", greatest_time_ms=now_ms, greatest_root_version=root_version)
        atomic_file.replace(self._dir, "clock.json", _encode(record))

    @contextlib.contextmanager
    def _directory(self, name: str, *, make: bool) -> Iterator[int]:
        if not make and not _exists(self._dir, name):
            raise _MissingError(f"`{self.path / name}` is missing", where=str(self.path / name))
        fd = atomic_file.open_subdirectory(self._dir, name, where=str(self.path), make=make, error=errors.HomeError)
        try:
            yield fd
        finally:
            os.close(fd)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return atomic_file.locked(self._dir, where=str(self.path), error=errors.StateError)


def _taken_away(record: _ClockRecord, path: Path) -> errors.TrustError:
    # An older root would be without the revocations of the later: what a folder put back must not do.
    return errors.TrustError(
        f"trust root version {record.greatest_root_version} was installed and is gone",
        hint="restore it from a backup; without it nothing is run"
        + (", and where init was killed, repeat it" if record.greatest_root_version == 1 else ""),
        where=str(path / "trust"),
    )


def _record_name(agent_id: str) -> str:
    # A digest: an id may hold dots, differ only in case, or be longer than a file name.
    return f"{hashlib.sha256(agent_id.encode()).hexdigest()}.json"


def _root_name(version: int) -> str:
    return f"root-{version:08d}.json"


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _encode(record: _Closed) -> bytes:
    return strict_json.dumps(record.model_dump()) + b"\n"


@functools.lru_cache(maxsize=64)
def _read(model: type[_Record], raw: bytes) -> _Record:
    # A dispatch reads each record twice (sandbox.standby). Equal bytes give equal records, and records are frozen.
    return strict_json.validate(model, strict_json.loads(raw, max_bytes=_MAX_RECORD_BYTES))


def _parse(model: type[_Record], raw: bytes, where: str) -> _Record:
    try:
        record: _Record = _read(model, raw)
    except strict_json.MalformedJsonError as e:
        raise errors.StateError(
            f"the record is damaged: {e}", hint="restore it from a backup; without it nothing is run", where=where
        ) from None
    return record

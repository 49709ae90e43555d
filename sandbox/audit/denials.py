"""Write one run's denials to the log: reported by every layer, bounded, flushed before the run's last row.

Each layer that refuses something calls ``told``. In a flood a denial costs one dictionary look-up, and the log gets the
rows that ``policy.denials.Bounds`` lets through. A row that cannot be written ends the run, as for any other event.

A row is durable before the next, about a millisecond each, in the process that also watches the agent's deadlines.
So only a few rows are written at once, and the round writes the rest. An agent that is refused 500 different things at
once therefore delays nothing.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from policy import data, denials, errors
from policy.compile.artefacts import Artefacts
from sandbox.audit.agent_denials import AgentDenials
from sandbox.kernel.runsc import debug_log
from sandbox.rate_limit import Tokens
from sandbox.run_io import Outcome, PeriodicCheck

_STARTS = frozenset({"execve", "execveat"})
# Calls whose failures are reported. A call of TRACED costs far more than its line in the log. Those of TRACED_FILES are
# reported only if the operator sets tell_files, since an open then takes 1.5 times as long.
TRACED: Final = ("clone", "fork", "vfork", "execve", "execveat")
TRACED_FILES: Final = (
    *("open", "openat", "creat", "write", "pwrite64", "writev", "pwritev", "ftruncate", "fallocate"),
    *("sendfile", "copy_file_range", "mkdir", "mkdirat", "unlink", "unlinkat", "rename", "renameat", "renameat2"),
)
_FORKS, _OPENS = frozenset(TRACED[:3]), frozenset({"open", "openat", "creat"})
_FULL = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
# Paths that no manifest can grant or every agent has: the package's own files, and gVisor's own mounts.
_NO_GRANT = ("/workspace/", "/proc/", "/sys/", "/dev/", "/tmp/")  # noqa: S108 - the sandbox's own
_SHARED: Final = "/dev/shm/"  # noqa: S108 - of the agent's own root
_UNWRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
# A path as gVisor writes it: after its address in memory, and after the directory of the call where it has one.
_PATH = re.compile(r"0x[0-9a-f]+ (?P<path>[^,]*), (?P<how>.*)", re.DOTALL)
_PATH_AT = re.compile(r"(?:AT_FDCWD|0x[0-9a-f]+) (?P<at>[^,]*), 0x[0-9a-f]+ (?P<path>[^,]*), (?P<how>.*)", re.DOTALL)
_WRITING = re.compile(r"O_(?:WRONLY|RDWR|CREAT|TRUNC)")
# Half of the second that a summary covers: the most that it is written late.
_LOOK_SECONDS = 0.5
# The most rows written at once, the rate beyond them, and the delay before the next when some wait.
_AT_ONCE, _ROWS_PER_SECOND, _SOON_SECONDS = 4, 100, 0.04
# The errors that end a run at a limit. Each is a denial as well, with the limit as its target.
_LIMITS: Mapping[type[errors.RunError], tuple[str, str]] = {
    errors.OutOfMemoryError: ("memory", "memory_mb"),
    errors.DeadlineError: ("time", ""),
    errors.CpuTimeError: ("time", ""),
}


# The file that the probes of a run create (sandbox.probes.preload).
PRELUDE_FILE: Final = "/.covenant-prelude-file"


class DenialLog:
    """The denials of one run. ``write`` appends a row to the log. Not thread-safe."""

    def __init__(self, write: Callable[[denials.Row], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._bounds = denials.Bounds()
        self._totals: dict[denials.Denial, int] = {}
        self._waiting: deque[denials.Row] = deque()
        self._agent: AgentDenials | None = None
        self._tokens = Tokens(_ROWS_PER_SECOND, _AT_ONCE, clock())

    def told(self, denial: denials.Denial, *, count: int = 1) -> None:
        """Record that something was refused to the agent ``count`` times.

        Raises:
            errors.LedgerError: Raised when a row cannot be written.
        """
        self._waiting += self._bounds.told(denial, now_ms=self._now(), count=count)
        self._write_some()

    @contextlib.contextmanager
    def telling(self, agent: AgentDenials) -> Iterator[None]:
        """Write each row to the agent's file as well, after the log, for as long as the file is open."""
        self._agent = agent
        try:
            yield
        finally:
            self._agent = None

    def ended_by(self, error: errors.CovenantError | None) -> None:
        """Record a denial if the run was ended by a limit."""
        known = _LIMITS.get(type(error)) if isinstance(error, errors.RunError) else None
        if error is not None and known is not None:
            layer, target = known
            self.told(denials.Denial(layer, target or error.details.get("clock") or "unknown", error.code))

    def round(self) -> PeriodicCheck:
        """Return the round for the exchange (run_io.ContainerIO.rounds), which writes the summaries that are due."""
        return PeriodicCheck(_LOOK_SECONDS, self._look, lambda: _SOON_SECONDS if self._waiting else _LOOK_SECONDS)

    def flush(self) -> None:
        """Write all remaining rows. Called once the run has ended, before its last row."""
        self._waiting += self._bounds.wind_up()
        while self._waiting:
            self._put(self._waiting.popleft())

    @property
    def totals(self) -> tuple[denials.Row, ...]:
        """Every denial that has a row, with its count, in the order of their first rows."""
        return tuple(denials.Row(denial, count) for denial, count in self._totals.items())

    def _look(self) -> Outcome:
        self._waiting += self._bounds.due(now_ms=self._now())
        self._write_some()
        return None

    def _write_some(self) -> None:
        while self._waiting and self._tokens.take(self._clock()):
            self._put(self._waiting.popleft())

    def _put(self, row: denials.Row) -> None:
        self._write(row)
        self._totals[row.denial] = self._totals.get(row.denial, 0) + row.count
        if self._agent is not None:
            self._agent.put(row)

    def _now(self) -> int:
        return int(self._clock() * 1000)


def traced(*, files: bool, arch: str) -> tuple[str, ...]:
    """Return the traced calls that this architecture has."""
    known = data.syscalls(arch).numbers
    return tuple(name for name in (*TRACED, *(TRACED_FILES if files else ())) if name in known)


def every_program_is_granted(artefacts: Artefacts) -> bool:
    """Whether every program of the root may be started."""
    image = artefacts.json("mounts.json")["root"].get("image")
    return image is not None and "root" in image["executable"]


def failed_calls(told: denials.Told, *, every_program: bool = False) -> Callable[[debug_log.Failed, int], None]:
    """Return the handler of failed traced calls with their counts. Most failures are no refusal.

    ``every_program``: as ``every_program_is_granted``. A program that is not there is no refusal then: a shell or a
    library looks for it in each directory of PATH.
    """

    def tell(failed: debug_log.Failed, count: int) -> None:
        if every_program and failed.call in _STARTS and failed.errno == errno.ENOENT:
            return
        denial = _of_failed(failed)
        if denial is not None:
            told(denial, count=count)

    return tell


def _of_failed(failed: debug_log.Failed) -> denials.Denial | None:
    if failed.call in _FORKS:
        return denials.Denial("pids", "pids_max", denials.TOO_MANY) if failed.errno == errno.EAGAIN else None
    if failed.errno in _FULL:
        return denials.Denial("disk", "disk_mb", denials.FULL)
    found = (_PATH_AT if failed.call.endswith("at") else _PATH).fullmatch(failed.arguments)
    if found is None:
        return None
    path = posixpath.normpath(posixpath.join("/", found.groupdict().get("at", ""), found["path"]))
    if failed.call in _STARTS:
        is_refused = failed.errno in (errno.EACCES, errno.ENOENT)
        return denials.Denial("exec", path, denials.NOT_GRANTED) if is_refused else None
    if failed.call in _OPENS and path.startswith(_SHARED) and failed.errno in _UNWRITABLE:
        # Names there are random: one denial for all of them.
        return denials.Denial("path", _SHARED.rstrip("/"), denials.READ_ONLY)
    if failed.call not in _OPENS or path == PRELUDE_FILE or path.startswith(_NO_GRANT):
        return None
    if failed.errno in _UNWRITABLE and _WRITING.search(found["how"]):
        return denials.Denial("path", path, denials.READ_ONLY)
    return denials.Denial("path", path, denials.NOT_GRANTED) if failed.errno == errno.ENOENT else None


def refused_calls(artefacts: Artefacts, told: denials.Told) -> Callable[[str, int], None]:
    """Return the handler of calls that the filter of these artefacts refused, by name and count."""
    rules = artefacts.json("seccomp.json")["syscalls"]
    ruled = {name for rule in rules if rule.get("args") for name in rule["names"]}
    # These get ENOSYS, so that a libc uses an older call. That is no refusal.
    missing = {name for rule in rules if rule["action"] == "SCMP_ACT_TRACE" for name in rule["names"]}

    def tell(name: str, count: int) -> None:
        if name in missing:
            return
        if name in _STARTS:
            told(denials.Denial("exec", denials.EXECVE, denials.NOT_GRANTED), count=count)
        else:
            code = denials.ARGUMENTS if name in ruled else denials.NOT_GRANTED
            told(denials.Denial("syscall", name, code), count=count)

    return tell

"""The agents that the daemon knows: scanned below its home, and scanned again when a package is added, changed or
removed.

The known agents are one value that is replaced as a whole, so no reader sees a partial change. An intent that was
routed before a change continues with its agent.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import watchfiles
from watchfiles._rust_notify import WatchfilesRustInternalError

from covenant.runtime import packages
from covenant.runtime.packages import Card, Listed
from covenant.visible import visible
from policy import decide, errors
from policy.signing import strict_json

_LOG: Final = logging.getLogger(__name__)

DIRECTORY: Final = "agents"
# Several files of a package change at once: they are scanned together, this long after the last change.
_SETTLE_MS: Final = 100
# The longest delay of a scan while changes continue.
_AT_LATEST_MS: Final = 2_000
# The pause before a watch that an unreadable name ended begins again.
_AGAIN_SECONDS: Final = 1.0
# How long a watch without news runs. A change that came just before a watch is found after it.
_IDLE_MS: Final = 1_000
# The pause before packages are read again whose file system did not answer.
_HANGING_AGAIN_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Change:
    """The result of a scan: ids that are new, ids that are gone, and ids with a changed manifest."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    # For each package that cannot be routed to: the directory, and the code of the error.
    refused: tuple[tuple[str, str], ...] = ()
    # Whether the listing changed in any way.
    differs: bool = False


# Called with a change before it takes effect; an exception cancels the change.
Noted = Callable[[Change], Awaitable[None]]


async def _nobody(change: Change) -> None:
    """Do nothing."""


class Agents:
    """The packages of a home. ``reload`` scans; before the first scan there are none."""

    def __init__(self, home: Path) -> None:
        self.place = home / DIRECTORY
        self._listing: tuple[Listed, ...] = ()
        self._cards: tuple[Card, ...] = ()
        self._by_id: dict[str, Card] = {}
        self._turn = anyio.Lock()
        # When packages on other file systems were read last.
        self._read = -math.inf

    def cards(self) -> Sequence[Card]:
        """Return the agents that can be routed to, sorted by id. The same object until a change."""
        return self._cards

    def listing(self) -> Sequence[Listed]:
        """Return every package, with its error if it has one, sorted by id."""
        return self._listing

    def find(self, agent_id: str) -> Card:
        """Return the agent with this id.

        Raises:
            errors.AgentIdTakenError: two packages have it.
            errors.NoAgentError: none has.
        """
        card = self._by_id.get(agent_id)
        if card is not None:
            return card
        taken = next((one.error for one in self._listing if one.id == agent_id and one.error is not None), None)
        raise taken or errors.NoAgentError(
            f"no agent has the id `{strict_json.shown(agent_id)}`", hint="covenant agents list"
        )

    def required(self) -> frozenset[str]:
        """Return the actions that agents require of their callers: ``bootstrap`` grants these."""
        return frozenset(action for card in self._cards for action in card.manifest.capabilities.required)

    async def reload(self, noted: Noted = _nobody) -> Change:
        """Scan again, and return the change; ``noted`` is called first if there is one.

        Raises:
            errors.HomeError: the directory cannot be read; the known agents stay.
        """
        async with self._turn:
            mounted = await packages.mounted(self.place)
            self._read = time.monotonic()
            listing = await anyio.to_thread.run_sync(packages.scan, self.place, mounted)
            known = {one.card.id: one.card for one in listing if one.card is not None and one.error is None}
            change = self._change(listing, known)
            if change.differs:
                await noted(change)
                _log_hanging(listing, before=self._listing)
                self._listing, self._by_id = listing, known
                self._cards = tuple(known[agent_id] for agent_id in sorted(known))
            return change

    def _change(self, listing: Sequence[Listed], known: Mapping[str, Card]) -> Change:
        before = self._by_id
        shown = [(one.directory, one.card, one.error and one.error.code) for one in self._listing]
        return Change(
            added=tuple(sorted(known.keys() - before.keys())),
            removed=tuple(sorted(before.keys() - known.keys())),
            changed=tuple(sorted(i for i in known.keys() & before.keys() if known[i] != before[i])),
            refused=tuple((one.directory, one.error.code) for one in listing if one.error is not None),
            differs=shown != [(one.directory, one.card, one.error and one.error.code) for one in listing],
        )

    async def watch(self, noted: Noted = _nobody, *, stop: anyio.Event | None = None) -> None:
        """Call ``reload`` when a package is added, changed or removed, until ``stop`` or cancellation.

        Returns early, with a log message, if the directory cannot be watched: then only ``covenant agents reload``
        scans.
        """
        try:
            while (pause := await self._watched(noted, stop)) is not None:
                await anyio.sleep(pause)
                await self._look(noted)
        except* (OSError, RuntimeError) as e:
            # The watcher raises RuntimeError if there are no more inotify watches, or the directory was removed.
            _LOG.warning("agents are not watched for changes (%r): ask with `covenant agents reload`", e.exceptions[0])

    async def _watched(self, noted: Noted, stop: anyio.Event | None) -> float | None:
        """Watch until ``stop``. Return the seconds to pause before a scan and another watch: the directories have
        changed, so that the watcher would not report all, or a name that is no UTF-8 ended it. None at ``stop``.

        Directories on other file systems are not watched, since the watcher would wait for them.
        """
        looked, pause = False, None
        await anyio.to_thread.run_sync(lambda: self.place.mkdir(mode=0o700, exist_ok=True))
        watched, below = _which(self.place), await anyio.to_thread.run_sync(packages.directories, self.place)
        try:
            async for changes in watchfiles.awatch(
                *(self.place, *below),
                watch_filter=self._concerns,
                debounce=_AT_LATEST_MS,
                step=_SETTLE_MS,
                stop_event=stop,
                rust_timeout=_IDLE_MS,
                yield_on_timeout=True,
                recursive=False,
                ignore_permission_denied=True,
            ):
                # Scan once without a change as well: the watch has missed changes between the first scan and its own
                # start.
                looks, looked = bool(changes) or not looked or self._reads_again(), True
                if looks:
                    await self._look(noted)
                if _which(self.place) != watched:
                    pause = _AGAIN_SECONDS
                    break
                # Also at the first scan: a directory may have come between the list and the watch.
                if looks and below != await anyio.to_thread.run_sync(packages.directories, self.place):
                    pause = 0.0
                    break
        except* FileNotFoundError:
            pause = 0.0  # one of the directories was removed before the watch began
        except* WatchfilesRustInternalError as e:
            pause = _AGAIN_SECONDS
            _LOG.warning("agents: the watch begins anew: %r", e.exceptions[0])
        return pause

    def _reads_again(self) -> bool:
        """Whether a package did not answer, and it is time to ask it again."""
        late = time.monotonic() - self._read >= _HANGING_AGAIN_SECONDS
        return late and any(isinstance(one.error, errors.HangingError) for one in self._listing)

    def _concerns(self, change: watchfiles.Change, path: str) -> bool:
        """Whether the path is a package's directory or its manifest. Other files of a package are read when it is
        run."""
        try:
            parts = Path(path).relative_to(self.place).parts
        except ValueError:
            return False
        return len(parts) == 1 or (len(parts) == 2 and parts[1] == decide.MANIFEST)

    async def _look(self, noted: Noted) -> None:
        try:
            await self.reload(noted)
        except errors.CovenantError as e:
            _LOG.warning("agents: %s", e)


def _log_hanging(listing: Sequence[Listed], *, before: Sequence[Listed]) -> None:
    known = {one.directory for one in before if isinstance(one.error, errors.HangingError)}
    for one in listing:
        if isinstance(one.error, errors.HangingError) and one.directory not in known:
            # A name may have newlines, which the log keeps.
            _LOG.warning("package `%s`: %s (fix: %s)", visible(one.directory), one.error.message, one.error.hint)


def _which(place: Path) -> tuple[int, int] | None:
    """Return the identity of the directory with this name; None if there is none."""
    try:
        info = os.lstat(place)
    except OSError:
        return None
    return info.st_dev, info.st_ino

"""The agents that the daemon knows now: found below its home, and found again when a package comes, changes or goes.

What is known is one value that is replaced whole, so that nobody ever sees half of a change; an intent that was
routed before one goes on with what it was routed by.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import watchfiles
from watchfiles._rust_notify import WatchfilesRustInternalError

from covenant.runtime import packages
from covenant.runtime.packages import Card, Listed
from policy import decide, errors
from policy.signing import strict_json

_LOG: Final = logging.getLogger(__name__)

DIRECTORY: Final = "agents"
# Several files of a package change at once: they are looked at together, this long after the last.
_SETTLE_MS: Final = 100
# And at the latest after this long, however long they go on changing.
_AT_LATEST_MS: Final = 2_000
# How long after a watch that a name ended the next begins.
_AGAIN_SECONDS: Final = 1.0
# How long a watch without news is left alone.
_IDLE_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Change:
    """What a look found: ids that were not there before, ids that are gone, and ids whose manifest is another."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    # Of those that cannot be routed to: the directory, and the code of the error.
    refused: tuple[tuple[str, str], ...] = ()
    # Whether the listing is another in any way.
    differs: bool = False


# Told of a change before it takes effect; what it raises keeps the change from taking any.
Noted = Callable[[Change], Awaitable[None]]


async def _nobody(change: Change) -> None:
    """Nobody is told."""


class Agents:
    """The packages of a home. ``reload`` looks; until the first look there are none."""

    def __init__(self, home: Path) -> None:
        self.place = home / DIRECTORY
        self._listing: tuple[Listed, ...] = ()
        self._cards: tuple[Card, ...] = ()
        self._by_id: dict[str, Card] = {}
        self._turn = anyio.Lock()

    def cards(self) -> Sequence[Card]:
        """Those that can be routed to, sorted by id. The same object until something changes."""
        return self._cards

    def listing(self) -> Sequence[Listed]:
        """Every package, with its error where it has one, sorted by id."""
        return self._listing

    def find(self, agent_id: str) -> Card:
        """The agent with this id.

        Raises:
            errors.AgentIdTakenError: two packages have it.
            errors.NoAgentError: none has.
        """
        card = self._by_id.get(agent_id)
        if card is not None:
            return card
        taken = next((one.error for one in self._listing if one.id == agent_id and one.error is not None), None)
        raise taken or errors.NoAgentError(
            f"no agent has the id `{strict_json.shown(agent_id)}`", hint="covenant agents lists them"
        )

    def required(self) -> frozenset[str]:
        """The actions that some agent requires of its caller: what ``bootstrap`` grants."""
        return frozenset(action for card in self._cards for action in card.manifest.capabilities.required)

    async def reload(self, noted: Noted = _nobody) -> Change:
        """Look again, and say what is different; ``noted`` is told first, where anything is.

        Raises:
            errors.HomeError: the place cannot be read; what was known before still holds.
        """
        async with self._turn:
            listing = await anyio.to_thread.run_sync(packages.scan, self.place)
            known = {one.card.id: one.card for one in listing if one.card is not None and one.error is None}
            change = self._change(listing, known)
            if change.differs:
                await noted(change)
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
        """``reload`` whenever a package comes, changes or goes, until ``stop`` or cancellation. Ends by itself where
        nothing can be watched, and says so in the log: then ``covenant agents reload`` is what looks."""
        try:
            while not await self._watched(noted, stop):
                # Whoever laid a name there that the watcher cannot read has us look now and then instead; and what was
                # watched may have been put away, with another in its place.
                await anyio.sleep(_AGAIN_SECONDS)
                await self._look(noted)
        except* (OSError, RuntimeError) as e:
            # RuntimeError is the watcher's own: no more inotify watches, or a directory that went away.
            _LOG.warning("agents are not watched for changes (%r): ask with `covenant agents reload`", e.exceptions[0])

    async def _watched(self, noted: Noted, stop: anyio.Event | None) -> bool:
        """Watch until ``stop``; False where the watcher met a name that is no UTF-8, which ends it and not us, or where
        the directory is another by now, of which it would say nothing."""
        looked, over = False, True
        await anyio.to_thread.run_sync(lambda: self.place.mkdir(mode=0o700, exist_ok=True))
        watched = _which(self.place)
        try:
            async for changes in watchfiles.awatch(
                self.place,
                watch_filter=self._concerns,
                debounce=_AT_LATEST_MS,
                step=_SETTLE_MS,
                stop_event=stop,
                rust_timeout=_IDLE_MS,
                yield_on_timeout=True,
                ignore_permission_denied=True,
            ):
                # Once without a change as well: what came between the first look and the first watch, nobody told us.
                if changes or not looked:
                    await self._look(noted)
                    looked = True
                if _which(self.place) != watched:
                    over = False
                    break
        except* WatchfilesRustInternalError as e:
            over = False
            _LOG.warning("agents: the watch begins anew: %r", e.exceptions[0])
        return over

    def _concerns(self, change: watchfiles.Change, path: str) -> bool:
        """A package's directory or its manifest. What else lies in a package is read when it is run."""
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


def _which(place: Path) -> tuple[int, int] | None:
    """Which directory stands under this name; None where none does."""
    try:
        info = os.lstat(place)
    except OSError:
        return None
    return info.st_dev, info.st_ino

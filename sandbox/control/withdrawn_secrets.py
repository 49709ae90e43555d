"""Have live runs check at once whether the secrets that their gates use are still in the vault.

The process that removed a secret calls ``announce``. Each shim asks the vault itself, cuts what used the secret or ends
the run, and confirms. Each shim also checks by the clock, for a removal that no process announced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Final, Protocol

from policy import errors
from sandbox.run_io import Outcome, PeriodicCheck
from sandbox.rundir import registry
from sandbox.rundir.registry import Entry
from sandbox.shim import control_socket

OPERATION: Final = "secrets"
# How long a run may take to confirm, and how long it may take to end.
CONFIRM_SECONDS: Final = 15.0
_LOOK_SECONDS, _AGAIN_SECONDS = 1.0, 0.005
# Runs that are asked at the same time.
AT_ONCE: Final = 32


class SecretHolder(Protocol):
    """A part of a run that holds secrets of the vault, or uses them."""

    @property
    def is_checking(self) -> bool:
        """Whether an answer of the vault, or the cut of a request, is still awaited."""

    def look(self, *, anew: bool = False) -> Outcome:
        """Ask the vault, and cut what used a secret that is gone. Returns the error that must end the run.

        ``anew``: an answer to an earlier question does not count.
        """


class SecretChecks:
    """Check the secrets of one run, by the clock and when a removal is announced."""

    def __init__(self) -> None:
        self._holders: list[SecretHolder] = []

    def add(self, holder: SecretHolder) -> None:
        """Check this one too. Called before the agent begins."""
        self._holders.append(holder)

    def round(self) -> PeriodicCheck:
        """Return the check by the clock, which also runs just before the agent is given its intent."""
        return PeriodicCheck(_LOOK_SECONDS, self._look, at_start=True)

    def answer(self, request: Mapping[str, Any]) -> control_socket.Reply:
        """Serve the operation ``secrets``. ``anew`` is false where a client waits for the end of an earlier check.

        Raises:
            errors.UsageError: Raised when the request has another field.
        """
        anew = request.get("anew", True)
        if set(request) - {"anew"} or type(anew) is not bool:
            raise errors.UsageError("a check of the secrets has the field `anew` alone, true or false")
        end = self._look(anew=anew)
        is_checking = any(one.is_checking for one in self._holders)
        return control_socket.Reply({"checking": is_checking, "ends": end is not None}, end)

    def _look(self, *, anew: bool = False) -> Outcome:
        found = [one.look(anew=anew) for one in self._holders]
        return next((one for one in found if one is not None), None)


def announce(state: Path) -> list[str]:
    """Have every live run check its secrets now. Returns the ids of the runs that did not confirm.

    A run that has confirmed uses no removed secret any more, or is gone. A run that does not listen yet checks just
    before its agent is given the intent.
    """
    waiting = [_Question(one) for one in registry.live(state / "runs")]
    until = time.monotonic() + CONFIRM_SECONDS
    # Each run is asked in the first half of the time, however many hang; the second half is for those that are slow.
    for share in (2, 1):
        waiting = _unconfirmed(waiting, (until - time.monotonic()) / share)
    return [one.entry.run_id for one in waiting]


def _unconfirmed(questions: Sequence[_Question], seconds: float) -> list[_Question]:
    """Ask runs, a part of them at the same time, and return those that did not confirm.

    Each gets the same part of ``seconds``, so that a run that hangs costs no other its question.
    """
    turns = -(-len(questions) // AT_ONCE)
    with futures.ThreadPoolExecutor(AT_ONCE) as pool:
        confirmed = list(pool.map(lambda one: one.is_confirmed(seconds / turns), questions))
    return [one for one, is_confirmed in zip(questions, confirmed, strict=True) if not is_confirmed]


class _Question:
    """The question to one run, which can be put again. A check that the run has begun since is not begun again."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._anew = True

    def is_confirmed(self, seconds: float) -> bool:
        """Whether the run confirms within this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                connection = control_socket.ControlConnection(self.entry.path, seconds=left)
            except errors.NoRunError:
                return True  # nothing listens
            except errors.KeeperError:
                return False
            # INVARIANT: an end of file alone is no end of the run. Its shim also disconnects a client that makes room
            # for another, so ask again until nothing listens.
            with connection, contextlib.suppress(errors.NoRunError):
                if (is_checked := self._checked(connection, until)) is not None:
                    return is_checked
            self._anew = True
            time.sleep(_AGAIN_SECONDS)
        return False

    def _checked(self, connection: control_socket.ControlConnection, until: float) -> bool | None:
        """Whether the run has checked its secrets in time. None: it ends.

        Raises:
            errors.NoRunError: the connection has ended.
        """
        try:
            answer = connection.ask(OPERATION, anew=self._anew)
            self._anew = False
            while answer["checking"] and not answer["ends"] and time.monotonic() < until:
                time.sleep(_AGAIN_SECONDS)
                answer = connection.ask(OPERATION, anew=False)
        except errors.NoRunError:
            raise
        except errors.CovenantError:
            return False  # it does not answer, or is of a version without this operation
        if answer["ends"]:
            connection.closed(until - time.monotonic())
            return None
        return not answer["checking"]

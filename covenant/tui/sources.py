"""Ask the daemon and the supervisor for the screens, by the clients that the command line uses.

The verb gives these functions; the screens know no socket. A source that cannot be asked does not keep the other from
being shown: ``either`` turns its error into a note.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policy import errors


class Ask(Protocol):
    """Ask once; what is refused is raised."""

    def __call__(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Return the document that answers.

        Raises:
            errors.CovenantError: it is refused, or no process answers.
        """


def _no_grant(held: Mapping[str, Any], duration: str) -> str:
    raise errors.UsageError("no key signs here", hint="covenant approvals grant REQUEST --once --key NAME")


@dataclass
class Sources:
    """The two services, and what this machine says about a denial. ``states`` has the last word about each service."""

    ask_daemon: Ask
    ask_supervisor: Ask
    # The lines that explain a denial of a package, with the line to add.
    explain: Callable[[Mapping[str, Any], str], Sequence[str]]
    # The command that connects this terminal to a session; its exit status.
    attach: Callable[[str], int]
    # Give a signed lease to a request that waits, for one of the durations; returns words, or raises.
    grant: Callable[[Mapping[str, Any], str], str] = _no_grant
    states: dict[str, str] = field(default_factory=dict)

    def daemon(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Ask the daemon.

        Raises:
            errors.CovenantError: it refused, or none answers.
        """
        return self._asked("daemon", self.ask_daemon, kind, fields)

    def supervisor(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Ask the supervisor.

        Raises:
            errors.CovenantError: it refused, or none answers.
        """
        return self._asked("supervisor", self.ask_supervisor, kind, fields)

    def _asked(self, name: str, ask: Ask, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = ask(kind, **fields)
        except (errors.DaemonSilentError, errors.ServiceError, errors.NoSupervisorError):
            self.states[name] = "none"
            raise
        except (errors.AuthenticationError, errors.KeyFileError, errors.ImpostorError):
            self.states[name] = "refuses"
            raise
        except errors.CovenantError:
            self.states[name] = "ok"
            raise
        self.states[name] = "ok"
        return answer


def either(notes: list[str], name: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an answer, or nothing and a note about ``name`` with the fix."""
    try:
        return ask()
    except errors.CovenantError as e:
        notes.append(f"! no {name}: {e}")
        if e.hint:
            notes.append(f"  fix: {e.hint}")
        return {}


def start(work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` in a thread that does not keep the process: an answer that never comes must not stop an end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread

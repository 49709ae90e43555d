"""Logins of the web console: codes of links that work once, and the sessions of browsers that came by one.

A session has two halves, and neither opens anything alone. The cookie is HttpOnly, so no script reads it; but browsers
send it to every port of 127.0.0.1, where an agent's published port may listen. The other half is only in the page of
this origin, which sends it in a header that no form, image or frame of another page can send.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from covenant.handlers.caller import Caller

V = TypeVar("V")

CODE_MS: Final = 2 * 60_000
SESSION_MS: Final = 12 * 3_600_000
# A further code, session or tab takes the place of the oldest.
MOST_CODES: Final = 8
MOST_SESSIONS: Final = 16
MOST_TABS: Final = 16
_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A browser that is logged in as ``caller``: the digests of its cookie, and of the other half of each tab."""

    key: bytes
    caller: Caller
    expires_at: int
    pages: dict[bytes, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entered:
    """The two halves of a new session, as the browser gets them."""

    session: ConsoleSession
    cookie: str
    page: str


class ConsoleLogins:
    """The codes and sessions of one daemon, in memory alone: a restart ends them.

    Only digests are kept. ``address`` is the origin of the console, empty without HTTP.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.address = ""
        self._now_ms = now_ms
        self._codes: dict[bytes, tuple[Caller, int]] = {}
        self._sessions: dict[bytes, ConsoleSession] = {}

    def expiry(self) -> int:
        """Return when a link that is made now ends."""
        return self._now_ms() + CODE_MS

    def invite(self, caller: Caller, expires_at: int) -> str:
        """Return the code of a new link."""
        code = secrets.token_urlsafe(_BYTES)
        _put(self._codes, _digest(code), (caller, expires_at), MOST_CODES)
        return code

    def redeem(self, code: str) -> Caller | None:
        """Take a code out and return its caller; None if it is unknown, used or too old."""
        caller, expires_at = self._codes.pop(_digest(code), (None, 0))
        return caller if self._now_ms() < expires_at else None

    def enter(self, caller: Caller, cookie: str = "") -> Entered:
        """Begin a session, or a further tab of the live one that ``cookie`` names: tabs share their cookies."""
        page = secrets.token_urlsafe(_BYTES)
        session = self._sessions.get(_digest(cookie))
        if session is None or session.caller != caller or not self.lives(session):
            cookie = secrets.token_urlsafe(_BYTES)
            session = ConsoleSession(_digest(cookie), caller, self._now_ms() + SESSION_MS)
            _put(self._sessions, session.key, session, MOST_SESSIONS)
        _put(session.pages, _digest(page), None, MOST_TABS)
        return Entered(session, cookie, page)

    def find(self, cookie: str, page: str) -> ConsoleSession | None:
        """Return the session of the two halves."""
        session = self._sessions.get(_digest(cookie))
        return session if session is not None and _digest(page) in session.pages and self.lives(session) else None

    def lives(self, session: ConsoleSession) -> bool:
        """Whether a session has not ended."""
        return session.key in self._sessions and self._now_ms() < session.expires_at

    def leave(self, session: ConsoleSession) -> None:
        """End a session."""
        self._sessions.pop(session.key, None)


def _put(kept: dict[bytes, V], key: bytes, value: V, most: int) -> None:
    """Keep a value; above the limit, the oldest goes."""
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()

"""The lines of the three files, as version 1 has them and with what is added.

granted.jsonl   {capability: {subject, action, scope, granted_by, expires_at}, signature}
                ours: granted_at, and generation where the same token was granted anew
revoked.jsonl   {signature, revoked_at}; ours: generation, and revocation, the daemon's signature over them
uses.jsonl      {signature} is one use; with `used` it says how many there were up to that line
"""

from __future__ import annotations

import functools
import json
import re
import sys
from dataclasses import dataclass
from typing import Any, Final

from covenant.keys import identity
from covenant.stores.capabilities.interface import Grant
from policy import base58, errors, wire_json
from policy.capabilities.token import SIGNATURE_BYTES, Token

# A grant as `granted` writes it, if its texts are plain: its keys in this order, each of them once. Any other line is
# read as JSON; for a line that both accept, the results are equal (tests/property/covenant/test_capability_rows.py).
_TEXT: Final = rb'"([ !#-\[\]-~]*)"'
_NUMBER: Final = rb"(0|[1-9][0-9]{0,19})"
_PLAIN: Final = re.compile(
    rb'\{"capability":\{"subject":\{"display":%(text)s,"pubkey":%(text)s\},"action":%(text)s,"scope":(.*),'
    rb'"granted_by":\{"display":%(text)s,"pubkey":%(text)s\},"expires_at":(?:null|%(number)s)\},'
    rb'"signature":%(text)s,"granted_at":%(number)s(?:,"generation":%(number)s)?\}'
    % {b"text": _TEXT, b"number": _NUMBER}
)

# The longest scope that the cache of ``_scope`` takes, in bytes.
_MOST_PLAIN_BYTES: Final = 512


class UnreadableError(Exception):
    """Raised when a line does not fit its file; only this module's callers see it."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Record that a grant was revoked, up to ``generation``. ``proof`` is None for version 1's unsigned tombstones."""

    signature: str
    revoked_at_ms: int
    generation: int
    proof: str | None

    def message(self) -> bytes:
        """Return the bytes that the daemon signs, without the domain's tag."""
        raw = base58.decode(self.signature, length=SIGNATURE_BYTES)
        return raw + self.revoked_at_ms.to_bytes(8) + self.generation.to_bytes(8)

    def proven(self, root: str) -> bool:
        """Whether the daemon signed it."""
        try:
            made = base58.decode(self.proof or "", length=SIGNATURE_BYTES)
            return identity.verifies(root, identity.Domain.CAPABILITY_REVOCATION, self.message(), made)
        except (ValueError, OverflowError):
            return False


def granted(grant: Grant) -> bytes:
    """Return the line of a grant."""
    token = grant.token
    row: dict[str, Any] = {
        "capability": {
            "subject": {"display": grant.subject_display, "pubkey": token.subject},
            "action": token.action,
            "scope": token.scope,
            "granted_by": {"display": grant.granted_by_display, "pubkey": token.granted_by},
            "expires_at": token.expires_at,
        },
        "signature": grant.signature,
        "granted_at": grant.granted_at_ms,
    }
    if grant.generation:
        row["generation"] = grant.generation
    return _line(row)


def read_granted(line: bytes) -> Grant:
    """Return the grant of a line. Its signature is not verified.

    Raises:
        UnreadableError: the line is no grant.
    """
    plain = _PLAIN.fullmatch(line)
    if plain is not None and len(plain[4]) <= _MOST_PLAIN_BYTES:
        scope = _scope(plain[4])
        if scope is not None:
            return _read_plain(scope, plain)
    return _read_any(line)


def _read_any(line: bytes) -> Grant:
    row = _read(line)
    try:
        capability = row["capability"]
        subject, grantor = capability["subject"], capability["granted_by"]
        ends = capability["expires_at"]
        return Grant(
            token=Token(
                subject=_text(subject["pubkey"]),
                action=_text(capability["action"]),
                scope=capability["scope"],
                granted_by=_text(grantor["pubkey"]),
                expires_at=None if ends is None else _number(ends),
            ),
            signature=_text(row["signature"]),
            subject_display=_text(subject["display"]),
            granted_by_display=_text(grantor["display"]),
            granted_at_ms=_number(row.get("granted_at", 0)),
            generation=_number(row.get("generation", 0)),
        )
    except (KeyError, TypeError) as e:
        raise UnreadableError from e


def _read_plain(scope: _Scope, plain: re.Match[bytes]) -> Grant:
    """Return the grant of a line that matches ``_PLAIN``.

    Raises:
        UnreadableError: a number is too large.
    """
    subject_display, subject, action, _, granted_by_display, granted_by, expires_at, *rest = plain.groups()
    signature, granted_at, generation = rest
    return Grant(
        Token(
            subject.decode(),
            _shared(action),
            scope.value,
            _shared(granted_by),
            None if expires_at is None else _number(int(expires_at)),
        ),
        signature.decode(),
        _shared(subject_display),
        _shared(granted_by_display),
        _number(int(granted_at)),
        0 if generation is None else _number(int(generation)),
    )


@functools.lru_cache(maxsize=4096)
def _shared(text: bytes) -> str:
    """Return one shared string: many grants name the same grantor and action."""
    return sys.intern(text.decode())


@dataclass(frozen=True, slots=True)
class _Scope:
    """A parsed scope: its value may be anything, including None."""

    value: Any


@functools.lru_cache(maxsize=1024)
def _scope(raw: bytes) -> _Scope | None:
    """Parse the scope of a plain line. Returns None if the line must be read whole: it is not one value, or nested
    deeply."""
    if raw.count(b"{") + raw.count(b"[") > wire_json.MAX_DEPTH // 2:
        return None
    try:
        return _Scope(wire_json.read(raw, wire_json.MAX_STORED))
    except errors.MalformedRequestError:
        return None


def revoked(tombstone: Tombstone) -> bytes:
    """Return the line of a tombstone."""
    row: dict[str, Any] = {"signature": tombstone.signature, "revoked_at": tombstone.revoked_at_ms}
    if tombstone.generation:
        row["generation"] = tombstone.generation
    if tombstone.proof is not None:
        row["revocation"] = tombstone.proof
    return _line(row)


def read_revoked(line: bytes) -> Tombstone:
    """Return the tombstone of a line.

    Raises:
        UnreadableError: the line is no tombstone.
    """
    row = _read(line)
    try:
        proof = row.get("revocation")
        return Tombstone(
            _text(row["signature"]),
            _number(row["revoked_at"]),
            _number(row.get("generation", 0)),
            None if proof is None else _text(proof),
        )
    except KeyError as e:
        raise UnreadableError from e


def used(signature: str, generation: int, count: int | None = None) -> bytes:
    """Return the line of one use, or of a total of ``count`` uses."""
    row: dict[str, Any] = {"signature": signature}
    if generation:
        row["generation"] = generation
    if count is not None:
        row["used"] = count
    return _line(row)


def read_used(line: bytes) -> tuple[str, int, int | None]:
    """Return the signature, generation and count of a line.

    Raises:
        UnreadableError: the line is no use.
    """
    row = _read(line)
    try:
        count = row.get("used")
        return _text(row["signature"]), _number(row.get("generation", 0)), None if count is None else _number(count)
    except KeyError as e:
        raise UnreadableError from e


def _read(line: bytes) -> dict[str, Any]:
    try:
        value = wire_json.read(line, wire_json.MAX_STORED)
    except errors.MalformedRequestError as e:
        raise UnreadableError from e
    if not isinstance(value, dict):
        raise UnreadableError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise UnreadableError
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise UnreadableError
    return value


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()

"""Find the packages whose signatures count under one version of the trust root and not under the next.

A key that is rotated, removed or revoked takes its signatures with it. Before the version is signed, the operator sees
which packages would be refused from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from policy import errors
from policy.manifest import parse
from policy.signing import envelope as envelopes
from policy.signing import root as roots
from policy.signing import statement as statements
from policy.signing import strict_json, trust
from sandbox.storage import package_reader as reader


class Unsigned(Struct, frozen=True):
    """A package that a version of the root would leave without enough signatures, and who signed it."""

    agent_id: str
    path: Path
    signers: tuple[str, ...]


def packages_below(places: Iterable[Path]) -> Iterator[Path]:
    """Yield the packages: each place with a manifest, and those right below one without."""
    for place in places:
        if (place / "agent.toml").is_file():
            yield place
            continue
        with contextlib.suppress(OSError):
            yield from sorted(path.parent for path in place.glob("*/agent.toml"))


def after(
    packages: Iterable[Path], present: roots.RootDocument, following: roots.RootDocument, *, now_ms: int
) -> list[Unsigned]:
    """Return the packages that count under ``present`` now and would not under ``following``.

    A package that cannot be read, or that does not count now, is not among them.
    """
    found = []
    for path in packages:
        with contextlib.suppress(errors.CovenantError, strict_json.MalformedJsonError):
            one = _signed(path)
            if one is not None and _counts(one, present, now_ms) and not _counts(one, following, now_ms):
                names = tuple(key.name for key in roots.made(present.keys, one.envelope))
                found.append(Unsigned(one.statement.agent_id, path, names))
    return found


class _Signed(Struct, frozen=True):
    envelope: envelopes.Envelope
    statement: statements.Statement
    role: str | None


def _signed(path: Path) -> _Signed | None:
    manifest, raw = reader.manifest_and_envelope(path)
    if raw is None:
        return None
    envelope = envelopes.decode(raw)
    return _Signed(envelope, statements.parse(envelope.payload), parse.parse(manifest).agent.role)


def _counts(one: _Signed, document: roots.RootDocument, now_ms: int) -> bool:
    statement, keys = one.statement, roots.made(document.keys, one.envelope)
    digest = hashlib.sha256(one.envelope.payload).hexdigest()
    if not keys or document.revoked.package(digest, statement.agent_id, statement.serial) is not None:
        return False
    try:
        trust.signers_of(keys, statement.agent_id, one.role, now_ms=now_ms, latest_ms=now_ms, where="")
    except errors.CovenantError:
        return False
    return statement.not_before <= now_ms < statement.expires_at

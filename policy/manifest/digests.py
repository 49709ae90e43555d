"""SHA-256 digests as tool manifests write them: ``sha256:`` and 64 hex digits, and what only looks like one.

Placeholders are shipped in manifests and forgotten there (the seed's own is one): they parse, so that ``pin`` can
replace them, and verify nothing.
"""

from __future__ import annotations

import hashlib
import re

from policy.manifest import text

PREFIX = "sha256:"
_WHOLE = re.compile(r"sha256:[0-9a-f]{64}")
# As documentation abbreviates one: some digits, then an ellipsis.
_SHORT = re.compile(r"sha256:[0-9a-f]{0,63}(?:\u2026|\.\.\.)")
_OF_NOTHING = hashlib.sha256(b"").hexdigest()
# Of 64 random hex digits, fewer than 8 different ones or 16 equal ones in a row come once in 10^17 times.
_FEWEST, _LONGEST = 8, 16


def well_formed(value: str) -> str:
    """A validator: a digest, or a placeholder for one.

    Raises:
        PydanticCustomError: another algorithm, length, or spelling.
    """
    if not (_WHOLE.fullmatch(value) or _SHORT.fullmatch(value)):
        raise text.wrong(
            f"digest {text.quote(value)} is not accepted",
            "write sha256: and 64 lower-case hex digits, or let pin do it",
        )
    return value


def filler(value: str) -> str:
    """Why a well-formed digest is a placeholder and no digest of anything, or the empty string."""
    if not _WHOLE.fullmatch(value):
        return "it is abbreviated"
    digits = value.removeprefix(PREFIX)
    if digits == _OF_NOTHING:
        return "it is the digest of nothing"
    if len(set(digits)) == 1:
        return f"it is `{digits[0]}` throughout"
    period = next(n for n in (2, 4, 8, 16, 32, 64) if digits == digits[:n] * (64 // n))
    if period < 64:
        return f"it repeats `{digits[:period]}`"
    if len(set(digits)) < _FEWEST or re.search(rf"(.)\1{{{_LONGEST - 1}}}", digits):
        return "it is no random number"
    return ""


def of(data: bytes) -> str:
    """The digest of some bytes."""
    return f"{PREFIX}{hashlib.sha256(data).hexdigest()}"

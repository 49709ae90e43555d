"""The envelopes of other hosts that were taken, in ``a2a/cross-host-seen.jsonl``: none is taken twice.

A claim is on disk before it counts, so a crash may lose a task and never takes one twice. The key is what is signed
(sender, task, time), not the signature, which others could write in another form. Claims are dropped once their time
is so long ago that the envelope would be refused as old.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple, Self

import anyio

from covenant.stores import journal
from policy import errors, wire_json

FILE: Final = "a2a/cross-host-seen.jsonl"
MAX_AGE_MS: Final = 5 * 60 * 1000
MAX_SKEW_MS: Final = 60 * 1000
# The least number of dropped claims for which the file is written anew.
_WORTH: Final = 64


class Claim(NamedTuple):
    """The identity of one envelope: it is the same however its signature is written."""

    sender: str
    task_id: str
    issued_at_ms: int


class SeenEnvelopes:
    """The claims of one daemon. Make it with ``open``."""

    def __init__(self, kept: journal.Journal) -> None:
        self.recovered: list[str] = list(kept.recovered)
        self._journal = kept
        self._lock = anyio.Lock()
        self._seen: dict[Claim, None] = {}
        self._dropped = 0

    @classmethod
    async def open(cls, home: Path) -> Self:
        """Open or create the file of a home.

        Raises:
            errors.StoreError: the file cannot be used, or a line of it is no claim: none is forgotten in silence.
        """
        seen = cls(await journal.Journal.open(home / FILE))
        await seen._journal.replay(seen._replay)
        return seen

    async def claim(self, one: Claim, now_ms: int) -> bool:
        """Claim an envelope. Returns False if it was claimed before.

        Raises:
            errors.StoreError: the claim is not on the disk.
        """
        async with self._lock:
            await self._drop_old(now_ms)
            if one in self._seen:
                return False
            await self._journal.append(_line(one))
            self._seen[one] = None
            return True

    async def _drop_old(self, now_ms: int) -> None:
        kept = [one for one in self._seen if now_ms - one.issued_at_ms <= MAX_AGE_MS + MAX_SKEW_MS]
        dropped = self._dropped + len(self._seen) - len(kept)
        if dropped >= _WORTH:
            await self._journal.rewrite([_line(one) for one in kept])
            dropped = 0
        self._seen, self._dropped = dict.fromkeys(kept), dropped

    async def close(self) -> None:
        """Close the file."""
        await self._journal.close()

    def _replay(self, line: bytes, where: str) -> None:
        try:
            sender, task_id, issued_at_ms = wire_json.read(line)
            if not (isinstance(sender, str) and isinstance(task_id, str) and type(issued_at_ms) is int):
                raise ValueError
        except (errors.MalformedRequestError, TypeError, ValueError):
            raise errors.StoreError("this line is no claim of an envelope", where=where) from None
        self._seen[Claim(sender, task_id, issued_at_ms)] = None


def _line(one: Claim) -> bytes:
    return json.dumps(list(one), separators=(",", ":")).encode()

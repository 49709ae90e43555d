"""Grants on disk: three append-only files that are read once, and an index that decides.

The order of writes defines the state after a crash. A grant's line is written before the grant counts. Revocation
lines, for the grant and each below it, are written before the reply. A use is written before the act that it permits. A
purge removes grants first, then their tombstones, then their uses: a revoked grant never remains without its tombstone.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import anyio

from covenant.keys.identity import Domain, Identity
from covenant.stores.capabilities import rows
from covenant.stores.capabilities.in_memory import InMemoryCapabilities, new
from covenant.stores.capabilities.interface import Grant, Use
from covenant.stores.journal import Journal
from covenant.wire.types import SignedCapability
from policy import base58, errors

T = TypeVar("T")


class DurableCapabilities(InMemoryCapabilities):
    """``interface.Capabilities`` in ``<home>/capabilities``. Open it with ``open``.

    ``recovered`` lists irregularities found at the opening, and the repairs.
    """

    def __init__(self, identity: Identity, granted: Journal, revoked: Journal, uses: Journal) -> None:
        super().__init__(identity.agent.pubkey)
        self._identity = identity
        self._granted, self._revoked, self._uses = granted, revoked, uses
        self._changing = anyio.Lock()
        self.recovered: list[str] = [*granted.recovered, *revoked.recovered, *uses.recovered]

    @classmethod
    async def open(cls, directory: Path, identity: Identity) -> Self:
        """Open or create the store in ``directory``. Tombstones of version 1 are signed and kept.

        Raises:
            errors.StoreError: a file cannot be used, or a revocation or use cannot be read, so its effect is unknown.
        """
        async with contextlib.AsyncExitStack() as stack:
            journals = []
            for name in ("granted", "revoked", "uses"):
                journal = await Journal.open(directory / f"{name}.jsonl")
                stack.push_async_callback(journal.close)
                journals.append(journal)
            store = cls(identity, *journals)
            await store._read_granted()
            await store._read_revoked()
            await store._read_uses()
            stack.pop_all()
        return store

    async def grant(self, signed: SignedCapability, now_ms: int) -> Grant:
        """See ``interface.Capabilities``."""
        made = new(signed, now_ms)
        async with self._change():
            present = self._book.check(made, now_ms)
            if present is None:
                await self._granted.append(rows.granted(made))
                self._book.add(made)
        return present or made

    async def revoke(self, signature: str, now_ms: int) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        async with self._change():
            ended = self._book.descent(signature)
            # The lowest first: after a crash that kept only some lines, no grant below a revoked one is effective.
            tombstones = [self._tombstone(grant, now_ms) for grant in reversed(ended)]
            await self._revoked.append_all([rows.revoked(one) for one in tombstones])
            for one in tombstones:
                self._book.bury(one.signature, one.generation, one.revoked_at_ms)
        return ended

    async def purge(self, before_ms: int, now_ms: int) -> int:
        """See ``interface.Capabilities``."""
        async with self._change():
            dropped = self._book.to_purge(before_ms, now_ms)
            await self._granted.rewrite(_without(dropped, lambda line: rows.read_granted(line).signature))
            await self._revoked.rewrite(_without(dropped, lambda line: rows.read_revoked(line).signature))
            await self._uses.rewrite(_without(dropped, lambda line: rows.read_used(line)[0]))
            self._book.drop(dropped)
        return len(dropped)

    async def use(self, signatures: Sequence[str]) -> Sequence[Use]:
        """See ``interface.Capabilities``."""
        metered = self._book.count(signatures)
        if not metered:
            return []
        # INVARIANT: no await between the count and the append, so that two uses cannot both be the last one.
        uses = self._book.uses(signatures)
        try:
            await self._uses.append_all([rows.used(one.signature, one.generation) for one in metered])
        except errors.StoreFullError:
            for one in metered:
                one.used -= 1
            raise
        return uses

    async def close(self) -> None:
        """See ``interface.Capabilities``."""
        async with self._change():
            for journal in (self._granted, self._revoked, self._uses):
                await journal.close()

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        # Shielded: a cancellation must not come between writing a line and applying it to the index.
        with anyio.CancelScope(shield=True):
            async with self._changing:
                yield

    def _tombstone(self, grant: Grant, now_ms: int) -> rows.Tombstone:
        bare = rows.Tombstone(grant.signature, now_ms, grant.generation, None)
        return self._signed(bare)

    def _signed(self, bare: rows.Tombstone) -> rows.Tombstone:
        proof = self._identity.sign(Domain.CAPABILITY_REVOCATION, bare.message())
        return rows.Tombstone(bare.signature, bare.revoked_at_ms, bare.generation, base58.encode(proof))

    # --- reading ----------------------------------------------------------------------------------------

    async def _read_granted(self) -> None:
        with _uncollected():
            async for line in self._granted:
                try:
                    self._book.add(rows.read_granted(line))
                except rows.UnreadableError:
                    # Such a line grants nothing, so it is safe to continue.
                    self.recovered.append("a line of `granted.jsonl` is no grant, and grants nothing")

    async def _read_revoked(self) -> None:
        found = [_readable(rows.read_revoked, line, "revoked.jsonl") async for line in self._revoked]
        for one in found:
            self._book.bury(one.signature, one.generation, one.revoked_at_ms)
        old = sum(one.proof is None for one in found)
        if old:
            await self._revoked.rewrite([rows.revoked(self._with_proof(one)) for one in found])
            self.recovered.append(f"{old} revocations of version 1 were signed")
        root = self._identity.agent.pubkey
        forged = sum(one.proof is not None and not one.proven(root) for one in found)
        if forged:
            # Revocations by other keys count too: refusing is the safe side.
            self.recovered.append(f"{forged} revocations do not bear this daemon's signature; they count")

    def _with_proof(self, one: rows.Tombstone) -> rows.Tombstone:
        with contextlib.suppress(ValueError):  # an invalid signature revokes no grant; its line is kept
            return self._signed(one) if one.proof is None else one
        return one

    async def _read_uses(self) -> None:
        counts: Counter[tuple[str, int]] = Counter()
        lines = 0
        async for line in self._uses:
            signature, generation, count = _readable(rows.read_used, line, "uses.jsonl")
            key = signature, generation
            counts[key] = counts[key] + 1 if count is None else max(counts[key], count)
            lines += 1
        kept = {key: count for key, count in counts.items() if self._is_current(*key)}
        for (signature, _), count in kept.items():
            grant = self._book.get(signature)
            if grant is not None:
                grant.used = count
        # Uses of purged grants would count against the same token when it is granted anew.
        if len(kept) < len(counts) or lines > 2 * len(kept) + 1000:
            await self._uses.rewrite([rows.used(*key, count) for key, count in kept.items()])

    def _is_current(self, signature: str, generation: int) -> bool:
        grant = self._book.get(signature)
        return grant is not None and grant.generation == generation


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection while reading: everything read is kept, and scanning it repeatedly doubles the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _readable(read: Callable[[bytes], T], line: bytes, name: str) -> T:
    try:
        return read(line)
    except rows.UnreadableError:
        raise errors.StoreError(
            f"a line of `{name}` cannot be read, and what it takes back is not known", hint="restore the file"
        ) from None


def _without(dropped: set[str], signature_of: Callable[[bytes], str]) -> Callable[[list[bytes]], Iterable[bytes]]:
    """Return a selector for the lines of all other grants; unreadable lines are kept."""

    def kept(lines: list[bytes]) -> Iterable[bytes]:
        for line in lines:
            try:
                if signature_of(line) in dropped:
                    continue
            except rows.UnreadableError:
                pass
            yield line

    return kept

"""The registry on disk, and the operator's token in a separate file.

INVARIANT: the token in ``operator.token`` admits the operator after a crash at any time. A new token is registered
before the file contains it, and the old one is revoked after; the next start revokes surplus tokens.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final, Self, TypeVar

import anyio
import anyio.to_thread

from covenant.stores.journal import Journal
from covenant.stores.peers import rows
from covenant.stores.peers.book import TokenBook
from covenant.stores.peers.in_memory import InMemoryPeers
from covenant.stores.peers.interface import PREFIX_LENGTH, Clock, Enrolled, PeerToken, Random, Rotation
from covenant.wire.types import AgentId
from policy import errors
from sandbox.storage import atomic_file

OPERATOR_FILE: Final = "operator.token"
_REGISTRY: Final = "registry.jsonl"
_MAX_TOKEN_BYTES: Final = 256
_MAX_BACKUP_BYTES: Final = 1 << 30
_TOKEN: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,44}\Z")

T = TypeVar("T")


class DurablePeers(InMemoryPeers):
    """``interface.Peers`` in ``<home>/peers``. Open it with ``open``.

    ``recovered`` lists irregularities found at the opening, and the repairs.
    """

    def __init__(self, directory: Path, journal: Journal, operator: AgentId, now_ms: Clock, random: Random) -> None:
        self._operator = operator
        self._now_ms = now_ms
        self._random = random
        self._book = TokenBook()
        self._directory = directory
        self._journal = journal
        self._changing = anyio.Lock()
        self.recovered: list[str] = [*journal.recovered]

    @classmethod
    async def open(cls, directory: Path, operator: AgentId, now_ms: Clock, *, random: Random = os.urandom) -> Self:
        """Open or create the registry in ``directory``. The operator's token file exists when this returns.

        Raises:
            errors.StoreError: the registry cannot be used, or a line of it cannot be read.
            errors.OperatorTokenError: the token's file is a symlink, not ours, or can be read by others.
        """
        async with contextlib.AsyncExitStack() as stack:
            journal = await Journal.open(directory / _REGISTRY)
            stack.push_async_callback(journal.close)
            peers = cls(directory, journal, operator, now_ms, random)
            await peers._read()
            await peers._settle_operator()
            stack.pop_all()
        # Expiries before this start were either reported then, or happened while no daemon was running to report them.
        peers.newly_expired()
        return peers

    async def enroll(self, agent: AgentId, expires_at_ms: int | None) -> Enrolled:
        """See ``interface.Peers``."""
        async with self._change():
            return await self._register(agent, expires_at_ms)

    async def rotate_operator(self) -> Rotation:
        """See ``interface.Peers``."""
        async with self._change():
            old = await anyio.to_thread.run_sync(self._token_of_file)
            made = await self._mint_operator()
            await self._revoke_operator_but(made.entry)
            return Rotation(made.token, (old or "")[:PREFIX_LENGTH], made.entry.token_prefix)

    async def revoke(self, entry: PeerToken) -> None:
        """See ``interface.Peers``."""
        async with self._change():
            await self._revoke(entry)

    async def purge(self, before_ms: int) -> int:
        """See ``interface.Peers``."""
        async with self._change():
            over = self._book.over(before_ms, self._now_ms())
            await self._journal.rewrite(_without({entry.digest for entry in over}))
            self._book.drop(over)
        return len(over)

    async def close(self) -> None:
        """See ``interface.Peers``."""
        async with self._change():
            await self._journal.close()

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        # Shielded: a cancellation must not come between writing a line and applying it to the index.
        with anyio.CancelScope(shield=True):
            async with self._changing:
                yield

    async def _register(self, agent: AgentId, expires_at_ms: int | None) -> Enrolled:
        token = self._book.mint(self._random)
        entry = self._entry(token, agent, expires_at_ms)
        await self._journal.append(rows.line(entry))
        self._book.add(entry)
        return Enrolled(token, entry)

    async def _revoke(self, entry: PeerToken) -> None:
        now_ms = self._now_ms()
        await self._journal.append(rows.line(rows.Revoked(entry.digest, now_ms)))
        self._book.bury(entry.digest, now_ms)

    # --- the operator -----------------------------------------------------------------------------------

    async def _settle_operator(self) -> None:
        token = await anyio.to_thread.run_sync(self._token_of_file)
        entry = self._book.lookup(token, self._now_ms()) if token is not None else None
        if token is not None and entry is not None and entry.agent_id.pubkey == self._operator.pubkey:
            self.operator_token = token
        else:
            entry = (await self._mint_operator()).entry
        ended = await self._revoke_operator_but(entry)
        if ended:
            self.recovered.append(f"{ended} tokens of the operator beside the one in `{OPERATOR_FILE}` were revoked")

    async def _mint_operator(self) -> Enrolled:
        made = await self._register(self._operator, None)
        try:
            await anyio.to_thread.run_sync(self._write_token, made.token)
        except OSError as e:
            # The old token stays; the new one was not given out.
            await self._revoke(made.entry)
            raise errors.StoreError(f"`{OPERATOR_FILE}` cannot be written: {e.strerror}") from e
        self.operator_token = made.token
        return made

    async def _revoke_operator_but(self, kept: PeerToken) -> int:
        others = [entry for entry in self.of(self._operator.pubkey) if entry is not kept]
        for entry in others:
            await self._revoke(entry)
        return len(others)

    def _token_of_file(self) -> str | None:
        """Return the token in the file; None if there is no file, or no token in it."""
        raw = self._in_directory(
            lambda fd: atomic_file.read(
                fd,
                OPERATOR_FILE,
                max_bytes=_MAX_TOKEN_BYTES,
                where=str(self._directory),
                error=errors.OperatorTokenError,
            )
        )
        text = (raw or b"").decode("ascii", "replace").strip()
        return text if _TOKEN.match(text) else None

    def _write_token(self, token: str) -> None:
        self._in_directory(lambda fd: atomic_file.replace(fd, OPERATOR_FILE, token.encode()))

    def _in_directory(self, act: Callable[[int], T]) -> T:
        fd = atomic_file.open_directory(self._directory, error=errors.OperatorTokenError)
        try:
            return act(fd)
        finally:
            os.close(fd)

    # --- reading ----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        found = [rows.read(line) async for line in self._journal]
        if any(row.clear for row in found):
            await self._migrate(found)
        for row in found:
            if isinstance(row.what, PeerToken):
                self._book.add(row.what)
            else:
                self._book.bury(row.what.digest, row.what.at_ms)

    async def _migrate(self, found: list[rows.PeerRow]) -> None:
        """Replace version 1's clear tokens by digests, and keep a copy of its file."""
        lines = [line async for line in self._journal]
        name = await anyio.to_thread.run_sync(self._back_up, b"".join(line + b"\n" for line in lines))
        await self._journal.rewrite([rows.line(row.what) for row in found])
        self.recovered.append(
            f"the tokens in `{_REGISTRY}` were replaced by their digests; `{name}` has the old file with"
            " the tokens in clear: delete it when it is not needed"
        )

    def _back_up(self, data: bytes) -> str:
        def make(fd: int) -> str:
            for number in range(1, 1000):
                name = f"{_REGISTRY}.v1-{number}"
                # An earlier try that crashed may have left an identical file.
                present = atomic_file.read(
                    fd, name, max_bytes=_MAX_BACKUP_BYTES, where=str(self._directory), error=errors.StoreError
                )
                if present == data:
                    return name
                if present is None:
                    atomic_file.create(fd, name, data)
                    return name
            raise errors.StoreError(f"there are 1000 old files of `{_REGISTRY}`")

        try:
            return self._in_directory(make)
        except OSError as e:
            raise errors.StoreError(f"`{_REGISTRY}` cannot be copied before it is changed: {e.strerror}") from e


def _without(dropped: set[bytes]) -> Callable[[list[bytes]], Iterable[bytes]]:
    def kept(lines: list[bytes]) -> Iterable[bytes]:
        return (line for line in lines if rows.read(line).what.digest not in dropped)

    return kept

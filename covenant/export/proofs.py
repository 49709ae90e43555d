"""Inclusion proofs: each row that a signed checkpoint covers, with its path to the checkpoint's root.

A checkpoint is made after its rows, so proofs come after the records, in a file of their own. A record and its proof
have the same ``uid`` and leaf hash.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from covenant.export.cursor import Cursor, Cursors
from covenant.export.ocsf_file import Lines, encoded
from covenant.export.sinks import POLL_SECONDS, About, rows_of, save
from policy import errors
from policy.audit_log import exported, merkle, note
from sandbox.audit import log_follow
from sandbox.audit.follow_process import Readers

NAME: Final = "proofs"
_LOOK_SECONDS: Final = 1.0


@dataclass
class ProofPump:
    """Write the proofs of one log."""

    log: str
    lines: Lines
    readers: Readers
    cursors: Cursors
    about: About
    once: bool = False

    async def run(self) -> None:
        """Prove rows until cancelled; with ``once`` those that the newest checkpoint covers."""
        cursor = self.cursors.load(self.log, NAME)
        while True:
            found = await asyncio.to_thread(self.readers.checkpoints, self.log)
            signed = _newest(found)
            if signed is not None and signed[1].size > (cursor.position.index if cursor.position else 0):
                cursor = await self._prove(cursor, *signed)
                await save(self.cursors, self.log, NAME, cursor, self.about)
            if self.once:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _prove(self, cursor: Cursor, signed: note.Note, checkpoint: note.Checkpoint) -> Cursor:
        """Read the rows twice: for the tree, 64 bytes a row, and for the proofs."""
        size = checkpoint.size
        frontier = merkle.Frontier(cursor.position.index if cursor.position else 0, cursor.subtrees)
        tree = merkle.Tree(frontier.size, frontier.hashes)
        origin, position = cursor.origin, cursor.position
        async for chunk in self._chunks(cursor, size):
            if chunk.subtrees and (position is None or chunk.lost):
                frontier = merkle.Frontier(chunk.start.cut, chunk.subtrees)
                tree = merkle.Tree(frontier.size, frontier.hashes)
            if not chunk.subtrees:
                for line in chunk.lines.split(b"\n")[:-1]:
                    leaf = merkle.leaf_hash(line)
                    tree.append(leaf)
                    frontier.append(leaf)
            origin, position = chunk.origin, chunk.end
        if frontier.size != size:
            # A cut took the rows up to the checkpoint and beyond.
            return Cursor(origin, position, [], frontier.hashes)
        if tree.root(size) != checkpoint.root:
            raise errors.LedgerError(f"the rows of the {self.log} log do not lead to its checkpoint of {size} rows")
        about = {"log_name": self.log, "log_provider": origin, "tree_size": size}
        await self.lines.write(encoded([{"kind": "checkpoint", **about, "note": signed.raw.decode()}]))
        async for chunk in self._chunks(cursor, size):
            found = (
                {
                    "kind": "inclusion",
                    "uid": row.event_id,
                    **about,
                    "index": row.place.leaf,
                    "leaf_hash_hex": row.place.leaf_hash_hex,
                    "path_hex": [value.hex() for value in tree.inclusion(row.place.leaf, size)],
                }
                for row in rows_of(chunk, exported.Log(self.log, origin, size))
                if row.place.leaf is not None and row.place.leaf >= tree.cut
            )
            await self.lines.write(encoded(found))
        return Cursor(origin, position, [], frontier.hashes)

    async def _chunks(self, cursor: Cursor, size: int) -> AsyncIterator[log_follow.Chunk]:
        """Yield what is behind the cursor up to leaf ``size``."""
        at, origin = cursor.position, cursor.origin
        while at is None or at.index < size:
            chunk = await asyncio.to_thread(self.readers.read, self.log, at, log_follow.CHUNK_BYTES)
            if chunk is not None:
                self.cursors.check(self.log, NAME, Cursor(origin), chunk.origin)
            if chunk is None or not (chunk.lines or chunk.lost):
                await asyncio.sleep(POLL_SECONDS)
                continue
            origin = chunk.origin
            if not chunk.subtrees and chunk.end.index > size:
                kept = b"".join(chunk.lines.splitlines(keepends=True)[: size - chunk.start.index])
                chunk = log_follow.shortened(chunk, kept)
            yield chunk
            at = chunk.end


def _newest(found: log_follow.Checkpoints) -> tuple[note.Note, note.Checkpoint] | None:
    """The newest checkpoint, verified under the log's key."""
    if not found.newest or not found.key:
        return None
    try:
        signed = note.Note.parse(json.loads(found.newest)["note"].encode())
        signed.verified([note.Verifier.parse(found.key.decode("ascii", "replace"))])
        return signed, note.Checkpoint.parse(signed.text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise errors.LedgerError(f"the newest checkpoint of the log is none: {e}") from e

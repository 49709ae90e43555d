"""Checkpoints: signed by the log, cosigned by witnesses, one for each size that was ever signed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from policy.audit_log import note


class Notary:
    """The checkpoints of one log. Nothing here reads or writes a file."""

    def __init__(self, origin: str, key: Ed25519PrivateKey) -> None:
        self.origin = origin
        self._key = key
        self._notes: dict[int, note.Note] = {}
        # Of those that were loaded: each is verified when it is first used, so that many cost a start nothing.
        self._unverified: set[int] = set()

    @property
    def verifier(self) -> note.Verifier:
        """The key that the log's own signatures verify under."""
        return note.Verifier(self.origin, note.SIGNATURE, self._key.public_key())

    def newest(self, above: int = -1) -> tuple[note.Checkpoint, note.Note] | None:
        """The checkpoint of the greatest size, where that is more than ``above``."""
        size = max(self._notes, default=-1)
        if size <= above:
            return None
        found = self._taken(size)
        assert found is not None
        return note.Checkpoint.parse(found.text), found

    def at(self, size: int, root: bytes) -> note.Note | None:
        """The checkpoint of that size.

        Raises:
            errors.LedgerError: another root was signed for it: the rows are not those that they were.
        """
        found = self._taken(size)
        if found is not None and note.Checkpoint.parse(found.text).root != root:
            raise errors.LedgerError(
                f"a checkpoint of {size} rows was signed with another root",
                hint="the rows were changed: run `covenant audit verify`, keep audit and audit-head as evidence",
            )
        return found

    def sign(self, size: int, root: bytes) -> note.Note:
        """A new checkpoint; it counts once it was ``keep``-ed."""
        text = note.Checkpoint(self.origin, size, root).text
        return note.Note(text, (note.sign(text, self.origin, self._key),))

    def merged(self, cosigned: note.Note, witnesses: Sequence[note.Verifier]) -> tuple[note.Note, list[note.Verified]]:
        """Our checkpoint with the cosignatures that verify, and those; it counts once it was ``keep``-ed.

        Raises:
            errors.NoteError: it is no checkpoint that we signed, or no witness's cosignature is on it.
        """
        checkpoint = note.Checkpoint.parse(cosigned.text)
        ours = self._taken(checkpoint.size)
        if ours is None or ours.text != cosigned.text:
            raise errors.NoteError(
                f"this log has signed no such checkpoint of {checkpoint.size} rows",
                hint="have witnesses cosign what `covenant audit checkpoint` printed",
            )
        known = [one for one in witnesses if one.type == note.COSIGNATURE]
        found = cosigned.verified(known)
        for one in found:
            key = (one.verifier.name, one.verifier.key_id)
            ours = ours.with_signature(next(s for s in cosigned.signatures if (s.name, s.blob[:4]) == key))
        return ours, found

    def keep(self, kept: note.Note) -> None:
        """From now on this is the checkpoint of its size."""
        size = note.Checkpoint.parse(kept.text).size
        self._notes[size] = kept
        self._unverified.discard(size)

    def load(self, line: bytes) -> None:
        """``keep`` what ``line`` wrote once; ``newest`` verifies it.

        Raises:
            errors.NoteError: it is no checkpoint of this log.
        """
        try:
            raw = json.loads(line)["note"].encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise errors.NoteError("a line of the checkpoints is none") from e
        found = note.Note.parse(raw)
        checkpoint = note.Checkpoint.parse(found.text)
        if checkpoint.origin != self.origin:
            raise errors.NoteError("a checkpoint is of another log")
        self._notes[checkpoint.size] = found
        self._unverified.add(checkpoint.size)

    def _taken(self, size: int) -> note.Note | None:
        found = self._notes.get(size)
        if found is not None and size in self._unverified:
            found.verified([self.verifier])
            self._unverified.discard(size)
        return found

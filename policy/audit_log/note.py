"""Signed notes, checkpoints and cosignatures, as C2SP writes them, with Ed25519 keys.

    c2sp.org/signed-note        text, an empty line, one line a signature: em dash, name, base64(key id || signature)
    c2sp.org/tlog-checkpoint    the text: origin, size, base64 of the root, each on a line
    c2sp.org/tlog-cosignature   a witness signs the text behind `cosignature/v1` and a time, which stands before the
                                signature

A key is known by its name and by the first four bytes of SHA-256(name || newline || type || key). Signatures of unknown
keys are passed over; one of a known key that does not verify refuses the whole note.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

from policy import errors

SIGNATURE: Final = 0x01
COSIGNATURE: Final = 0x04
MAX_BYTES: Final = 64 * 1024
MAX_SIGNATURES: Final = 64

_KEY_ID_BYTES = 4
_TIME_BYTES = 8
_SIGNATURE_BYTES = 64
_DASH = "\u2014"

KeyType = Literal[1, 4]


class Verifier(Struct, frozen=True):
    """A key that notes are checked with; its text form is a vkey, ``name+id+key``."""

    name: str
    type: KeyType
    key: Ed25519PublicKey

    @property
    def key_id(self) -> bytes:
        """The four bytes before its signatures."""
        return _key_id(self.name, self.type, self.key)

    @property
    def text(self) -> str:
        """The vkey."""
        material = bytes([self.type]) + self.key.public_bytes_raw()
        return f"{self.name}+{self.key_id.hex()}+{base64.b64encode(material).decode()}"

    @classmethod
    def parse(cls, text: str) -> Verifier:
        """The key of a vkey.

        Raises:
            errors.NoteError: it is none, of a type other than Ed25519 signature or cosignature, or its id is another's.
        """
        name, _, rest = text.strip().partition("+")
        key_id, _, encoded = rest.partition("+")
        material = _decode(encoded)
        if not is_name(name) or material is None or len(material) != 33:
            raise errors.NoteError(f"`{text[:200]}` is no key of a note: name+id+key")
        if material[0] == SIGNATURE:
            found = cls(name, SIGNATURE, Ed25519PublicKey.from_public_bytes(material[1:]))
        elif material[0] == COSIGNATURE:
            found = cls(name, COSIGNATURE, Ed25519PublicKey.from_public_bytes(material[1:]))
        else:
            raise errors.NoteError(f"key `{name}` has type {material[0]}; Ed25519 has 1, its cosignatures 4")
        if found.key_id.hex() != key_id:
            raise errors.NoteError(f"key `{name}` has id {found.key_id.hex()}, not `{key_id[:16]}`")
        return found


class NoteSignature(Struct, frozen=True):
    """One signature line: whose, and the bytes behind the base64."""

    name: str
    blob: bytes

    @property
    def line(self) -> str:
        """As it stands in a note, with its newline."""
        return f"{_DASH} {self.name} {base64.b64encode(self.blob).decode()}\n"


class Verified(Struct, frozen=True):
    """A signature that verified. ``time_s`` is when a witness says that it saw the note, in Unix seconds."""

    verifier: Verifier
    time_s: int | None


class Note(Struct, frozen=True):
    """A text that ends in a newline, and its signatures."""

    text: str
    signatures: tuple[NoteSignature, ...]

    @classmethod
    def parse(cls, raw: bytes) -> Note:
        """The note of these bytes; nothing of it is verified.

        Raises:
            errors.NoteError: they are none.
        """
        if len(raw) > MAX_BYTES:
            raise errors.NoteError(f"a note of {len(raw)} bytes is longer than {MAX_BYTES}")
        try:
            whole = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise errors.NoteError("the note is not UTF-8") from e
        if any(ch < " " and ch != "\n" for ch in whole):
            raise errors.NoteError("the note holds control characters")
        text, gap, rest = whole.rpartition("\n\n")
        if not gap or not rest.endswith("\n"):
            raise errors.NoteError("the note has no signatures behind an empty line")
        lines = rest[:-1].split("\n")
        if len(lines) > MAX_SIGNATURES:
            raise errors.NoteError(f"the note has {len(lines)} signatures, more than {MAX_SIGNATURES}")
        return cls(text + "\n", tuple(parse_signature(line) for line in lines))

    @property
    def raw(self) -> bytes:
        """The bytes of the note."""
        return f"{self.text}\n{''.join(one.line for one in self.signatures)}".encode()

    def with_signature(self, signature: NoteSignature) -> Note:
        """The note with one more, in the place of an older one of the same key."""
        others = [one for one in self.signatures if (one.name, one.blob[:4]) != (signature.name, signature.blob[:4])]
        return Note(self.text, (*others, signature))

    def verified(self, verifiers: Sequence[Verifier]) -> list[Verified]:
        """Whose signatures verify, in the order of the note.

        Raises:
            errors.NoteError: one of a known key does not, or none is of a known key.
        """
        known = {(one.name, one.key_id): one for one in verifiers}
        found = []
        for signature in self.signatures:
            verifier = known.get((signature.name, signature.blob[:_KEY_ID_BYTES]))
            if verifier is not None:
                found.append(_verified(self.text, signature, verifier))
        if not found:
            raise errors.NoteError("the note has no signature of a known key")
        return found


class Checkpoint(Struct, frozen=True):
    """How far a log goes: the root of its tree at ``size``."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        """The text of its note."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """The checkpoint of a note's text; extension lines are passed over.

        Raises:
            errors.NoteError: it is none.
        """
        lines = text.split("\n")
        if len(lines) < 4 or lines[-1] or not all(lines[:-1]):
            raise errors.NoteError("a checkpoint has at least three lines, none of them empty")
        origin, size, encoded = lines[:3]
        root = _decode(encoded)
        if not (size.isascii() and size.isdigit()) or str(int(size)) != size or int(size) >= 2**63:
            raise errors.NoteError(f"a checkpoint's size is not `{size[:32]}`")
        if root is None or len(root) != 32:
            raise errors.NoteError("a checkpoint's root is 32 bytes of base64")
        return cls(origin, int(size), root)


def sign(text: str, name: str, key: Ed25519PrivateKey) -> NoteSignature:
    """The log's own signature."""
    return NoteSignature(name, _key_id(name, SIGNATURE, key.public_key()) + key.sign(text.encode()))


def cosign(text: str, name: str, key: Ed25519PrivateKey, time_s: int) -> NoteSignature:
    """A witness's signature, made at that time (Unix seconds)."""
    signed = key.sign(_cosigned(text, time_s))
    return NoteSignature(
        name, _key_id(name, COSIGNATURE, key.public_key()) + time_s.to_bytes(_TIME_BYTES, "big") + signed
    )


def parse_signature(line: str) -> NoteSignature:
    """One signature line, without its newline.

    Raises:
        errors.NoteError: it is none.
    """
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.partition(" ")
    blob = _decode(encoded)
    if dash != _DASH or not is_name(name) or blob is None or len(blob) <= _KEY_ID_BYTES:
        raise errors.NoteError(f"`{line[:100]}` is no signature of a note")
    return NoteSignature(name, blob)


def stored_line(kept: Note) -> bytes:
    """Return a checkpoint as a line of ``checkpoints.jsonl``."""
    checkpoint = Checkpoint.parse(kept.text)
    document = {
        "origin": checkpoint.origin,
        "tree_size": checkpoint.size,
        "root_hash_hex": checkpoint.root.hex(),
        "note": kept.raw.decode(),
    }
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def is_name(name: str) -> bool:
    """Whether a key of a note may have this name: no blanks, no plus, not empty."""
    return bool(name) and "+" not in name and not any(ch.isspace() or ch < " " for ch in name)


def _verified(text: str, signature: NoteSignature, verifier: Verifier) -> Verified:
    blob = signature.blob[_KEY_ID_BYTES:]
    time_s, message = None, text.encode()
    if verifier.type == COSIGNATURE:
        time_s = int.from_bytes(blob[:_TIME_BYTES], "big")
        blob, message = blob[_TIME_BYTES:], _cosigned(text, time_s)
    try:
        if len(blob) != _SIGNATURE_BYTES or (time_s or 0) >= 2**63:
            raise InvalidSignature
        verifier.key.verify(blob, message)
    except InvalidSignature:
        raise errors.NoteError(f"the signature of `{verifier.name}` does not verify") from None
    return Verified(verifier, time_s)


def _cosigned(text: str, time_s: int) -> bytes:
    return f"cosignature/v1\ntime {time_s}\n{text}".encode()


def _key_id(name: str, type_: int, key: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + bytes([type_]) + key.public_bytes_raw()).digest()[:_KEY_ID_BYTES]


def _decode(text: str) -> bytes | None:
    """The bytes of canonical base64: what would be encoded to just this text."""
    try:
        value = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        return None
    return value if base64.b64encode(value).decode() == text else None

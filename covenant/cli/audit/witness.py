"""``covenant audit cosign``: act as a witness of a log.

A witness needs only a key; the formats are C2SP's (tlog-cosignature, and tlog-witness for requests). It promises a
single history: it signs only checkpoints that extend its last one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common
from covenant.cli.audit import proofs
from covenant.cli.daemon import client
from policy import errors

if TYPE_CHECKING:
    from policy.audit_log import note

_TURN_SECONDS = 60.0
_ROOT_BYTES = 32


@click.command(
    epilog=client.examples(
        "covenant audit cosign --key witness.key --name witness.example/w1 --log log.vkey < request.txt",
    )
)
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--key", required=True, type=click.Path(path_type=Path), help="The witness's key; made when absent.")
@click.option("--name", required=True, help="The witness's name, as in witness.example/w1.")
@click.option("--log", "log_key", required=True, help="The log's key: a vkey, or the file with it.")
def cosign(file: Any, key: Path, name: str, log_key: str) -> None:
    """Be a witness: cosign what `covenant audit checkpoint --old N` printed, if it extends what was cosigned before.

    Prints the cosignature line. What was cosigned last is kept in KEY.seen; those who use one key at once take turns
    (KEY.lock).
    """
    from policy.audit_log import note

    log = note.Verifier.parse(proofs.text_or_file(log_key))
    old, proof, signed = _request(file.read(note.MAX_BYTES + 1))
    signed.verified([log])
    given = note.Checkpoint.parse(signed.text)
    with _turn(key):
        private = _witness_key(key, name)
        seen_file = key.with_name(f"{key.name}.seen")
        seen = _seen(seen_file)
        _must_extend(seen.get(given.origin), old, given, proof)
        seen[given.origin] = {"size": given.size, "root_hex": given.root.hex()}
        # INVARIANT: stored before signing: a witness that forgot could be shown another history.
        _write(seen_file, json.dumps(seen).encode())
    proofs.shown(note.cosign(signed.text, name, private, int(time.time())).line)


def _seen(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last cosigned checkpoint by the log's name.

    Raises:
        errors.NoteError: the file is damaged, so the last checkpoint is unknown and nothing is cosigned.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        for one in found.values():
            if type(one["size"]) is not int or len(bytes.fromhex(one["root_hex"])) != _ROOT_BYTES:
                raise ValueError("a size or a root is none")
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise errors.NoteError(
            "what this witness cosigned last cannot be read",
            hint="put back the last copy of the file; without it, use a new key: this one might sign two histories",
            where=str(path),
        ) from e
    known: dict[str, dict[str, Any]] = found
    return known


def _request(raw: bytes) -> tuple[int, list[bytes], note.Note]:
    """Parse a request to a witness: the size that it knows, the proof from there, the checkpoint. A bare note has only
    the checkpoint."""
    from policy.audit_log import note

    if not raw.startswith(b"old "):
        return 0, [], note.Note.parse(raw)
    head, _, rest = raw.partition(b"\n\n")
    first, *lines = head.decode("ascii", "replace").split("\n")
    try:
        return int(first[4:]), [base64.b64decode(line, validate=True) for line in lines], note.Note.parse(rest)
    except ValueError as e:
        raise errors.NoteError("what should be cosigned is no request to a witness") from e


def _must_extend(seen: dict[str, Any] | None, old: int, given: note.Checkpoint, proof: list[bytes]) -> None:
    from policy.audit_log import merkle

    known = seen["size"] if seen else 0
    root = bytes.fromhex(seen["root_hex"]) if seen else merkle.EMPTY_ROOT
    if old != known:
        raise errors.NoteError(
            f"this witness cosigned {known} rows last, not {old}",
            hint=f"give it: covenant audit checkpoint --old {known}",
        )
    if not merkle.extends(old, given.size, root, given.root, proof):
        raise errors.NoteError(f"the checkpoint of {given.size} rows does not extend the one of {known}")


def _witness_key(path: Path, name: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from policy.audit_log import note

    if not note.is_name(name):
        raise errors.UsageError(f"a witness cannot have the name `{name}`", hint="no blanks, no plus")
    if path.exists():
        raw = path.read_bytes()
        if len(raw) != 32 or path.stat().st_mode & 0o077:
            raise errors.KeyFileError("the witness's key is not 32 bytes, or others can read it", where=str(path))
        return Ed25519PrivateKey.from_private_bytes(raw)
    key = Ed25519PrivateKey.generate()
    _write(path, key.private_bytes_raw())
    common.say(f"witness key: {note.Verifier(name, note.COSIGNATURE, key.public_key()).text}", err=True)
    return key


@contextlib.contextmanager
def _turn(key: Path) -> Iterator[None]:
    """Hold the lock of this key: two processes that read the same last checkpoint would sign two histories. The lock is
    a separate file, because the key and the checkpoints are replaced by new files."""
    from sandbox.storage import atomic_file

    path = key.with_name(f"{key.name}.lock")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise errors.KeyFileError(
            f"the lock of the witness's key cannot be opened: {e.strerror}", where=str(path)
        ) from e
    try:
        if not atomic_file.take(fd, _TURN_SECONDS):
            raise errors.KeyFileError("the witness's key is held by another process", where=str(path))
        yield
    finally:
        os.close(fd)


def _write(path: Path, data: bytes) -> None:
    """Replace the file durably, with its directory: a power cut that undid the rename would make the witness forget."""
    from sandbox.storage import atomic_file

    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        atomic_file.replace(folder, path.name, data)
    finally:
        os.close(folder)

"""``covenant audit purge|prove|checkpoint|cosigned``: cuts, proofs and checkpoints of the daemon's log.

``purge`` is the daemon's to do. What only reads works without one, from the files. The forms are C2SP's
(tlog-checkpoint, and tlog-witness for what is sent to a witness, who is ``covenant.cli.audit.witness``).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, times
from covenant.cli.daemon import client
from policy import errors

if TYPE_CHECKING:
    from covenant.cli.audit.read_logs import LogBytes
    from policy.audit_log import merkle, note
    from policy.audit_log import verify as check


def register(group: click.Group) -> None:
    """Put the verbs into ``covenant audit``."""
    for command in (purge, prove, checkpoint, cosigned):
        group.add_command(command)


def report(log: LogBytes) -> check.Report:
    """Verify a log that was read, with its checkpoints."""
    from dataclasses import replace

    from policy.audit_log import chain as audit_log_chain
    from policy.audit_log import verify as check

    key = None if log.public_key is None else audit_log_chain.read_public_key(log.public_key)
    done = check.verify(log.events, log.chain, log.head, key)
    wrong = [] if log.checkpoints is None else _wrong_checkpoints(log)
    wrong += _missing_checkpoints(log)
    if log.refused is not None and done.valid:  # for example a tail that is longer than a writer of ours leaves
        wrong.append(check.Failure("head_mismatch", "both", log.refused))
    notes = (*done.notes, *log.unacknowledged)
    return replace(done, valid=done.valid and not wrong, failures=(*done.failures, *wrong), notes=notes)


@click.command(epilog=client.examples("covenant audit purge --older-than-ms 2592000000"))
@click.option("--before-ms", type=click.IntRange(0), help="Cut what is older than this (Unix milliseconds).")
@click.option("--older-than-ms", type=click.IntRange(0), help="Cut what is older than this many milliseconds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def purge(before_ms: int | None, older_than_ms: int | None, as_json: bool) -> None:
    """Cut the oldest rows of the daemon's log. What is left begins with a signed record of what was cut."""
    if (before_ms is None) == (older_than_ms is None):
        raise errors.UsageError("one of --before-ms and --older-than-ms is needed, and one only")
    if before_ms is None:
        before_ms = max(0, times.now_ms() - (older_than_ms or 0))
    answer = _asked("purge_audit", before_ms=before_ms)
    if as_json:
        common.emit({"kind": "audit_purged", "purged": answer["purged"], "before_ms": before_ms})
    else:
        common.say(f"{answer['purged']} rows cut")


@click.command(
    epilog=client.examples(
        "covenant audit prove 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11",
        "covenant audit prove --log supervisor 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11",
    )
)
@click.argument("event_id")
@click.option("--log", "name", type=click.Choice(("daemon", "supervisor")), default="daemon", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def prove(ctx: click.Context, event_id: str, name: str, as_json: bool) -> None:
    """Prove that a row is in a log, and check the proof against its checkpoint. Status 3: it has no such row, or none
    that you may see.

    The supervisor's log, or an archive of it that COVENANT_STATE names, is read from its files, by its owner.
    """
    from policy.audit_log import merkle, note

    if name == "supervisor":
        proof, keys = _supervisors_proof(event_id)
    else:
        proof = _asked("prove_audit_inclusion", event_id=event_id, extended=True)["proof"]
        keys = []
    if proof is None:
        if as_json:
            common.emit({"kind": "audit_inclusion", "proof": None})
        else:
            common.say(f"the log has no row `{common.visible(event_id)}` of yours; see covenant audit recent", err=True)
        ctx.exit(common.EXIT_NO)
    leaf, path = bytes.fromhex(proof["leaf_hash_hex"]), tuple(map(bytes.fromhex, proof["path_hex"]))
    signed = note.Note.parse(proof["checkpoint"].encode())
    by = signed.verified(keys or [_log_key(), *_witnesses(signed)])
    root = note.Checkpoint.parse(signed.text).root
    if not merkle.includes(merkle.Inclusion(proof["leaf_index"], proof["tree_size"], leaf, path), root):
        raise errors.NoteError("the proof does not lead to the checkpoint's root")
    if as_json:
        common.emit({"kind": "audit_inclusion", "proof": proof})
        return
    common.say(f"row {proof['leaf_index']} of {proof['tree_size']}, root {proof['root_hash_hex']}")
    for one in by:
        seen = "" if one.time_s is None else f", who saw it at {one.time_s} (Unix seconds)"
        common.say(f"  signed by {common.visible(one.verifier.name)}{seen}")


def _supervisors_proof(event_id: str) -> tuple[dict[str, Any] | None, list[note.Verifier]]:
    """Return the proof of a row of the supervisor's log by the first checkpoint over it, and the checkpoints' key.

    A checkpoint is made where none covers the row yet.

    Raises:
        errors.UsageError: none can be made for it.
        errors.LedgerError: there is no log, or it is another user's.
    """
    from covenant.cli.audit import read_logs
    from policy.audit_log import note

    log = read_logs.read_log("supervisor")
    lines = log.events.split(b"\n")[:-1]
    tree = _tree_of(lines)
    at = next((at for at, line in enumerate(lines) if _is_row(line, event_id)), None)
    index = None if at is None else tree.size - len(lines) + at
    if index is None or index < tree.cut:
        return None, []
    stored = [(size, signed) for size, (_, signed) in _stored_checkpoints(log).items() if index < size <= tree.size]
    signed = min(stored, key=lambda one: one[0])[1] if stored else _newest_of_supervisor()
    given = note.Checkpoint.parse(signed.text)
    if given.size <= index:
        raise errors.UsageError(
            "no checkpoint covers this row yet: only rows about checkpoints came since the newest",
            hint="repeat after the next run",
        )
    if given.size > tree.size:  # it covers rows that came since they were read
        tree = _tree("supervisor")
    proof = {
        "event_id": event_id,
        "leaf_index": index,
        "tree_size": given.size,
        "leaf_hash_hex": tree.leaf(index).hex(),
        "root_hash_hex": given.root.hex(),
        "path_hex": [value.hex() for value in tree.inclusion(index, given.size)],
        "checkpoint": signed.raw.decode(),
    }
    return proof, [_log_key(log.path.with_name("audit-head"))]


def _is_row(line: bytes, event_id: str) -> bool:
    if event_id.encode() not in line:
        return False
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        return bool(json.loads(line)["id"] == event_id)
    return False


@click.command(
    epilog=client.examples(
        "covenant audit checkpoint",
        "covenant audit checkpoint --old 0 | curl --data-binary @- https://witness.example/add-checkpoint",
    )
)
@click.option("--old", type=click.IntRange(0), help="Print what a witness that knows this size is sent (tlog-witness).")
@click.option("--log", "name", type=click.Choice(("daemon", "supervisor")), default="daemon", show_default=True)
def checkpoint(old: int | None, name: str) -> None:
    """Print the newest checkpoint of a log as a signed note; made anew where a daemon runs, and of the supervisor's log
    by its owner."""
    from policy.audit_log import note

    signed = _newest() if name == "daemon" else _newest_of_supervisor()
    if old is None:
        shown(signed.raw.decode())
        return
    size = note.Checkpoint.parse(signed.text).size
    try:
        proof = _tree(name).consistency(old, size)
    except ValueError as e:
        raise errors.UsageError(f"there is no proof from {old} rows: {e}") from e
    lines = [f"old {old}", *(base64.b64encode(value).decode() for value in proof), "", signed.raw.decode()]
    shown("\n".join(lines))


@click.command(epilog=client.examples("covenant audit cosigned --witness witness.vkey < cosignatures.txt"))
@click.argument("file", type=click.File("rb"), default="-")
@click.option(
    "--witness", "witnesses", multiple=True, required=True, help="A witness's key: a vkey, or the file with it."
)
def cosigned(file: Any, witnesses: tuple[str, ...]) -> None:
    """Keep cosignatures with the checkpoint that they are of. FILE has the lines of witnesses, or a whole note.

    A running daemon keeps them, for its operator; where none runs, this does.
    """
    from policy.audit_log import note

    known = [note.Verifier.parse(text_or_file(text)) for text in witnesses]
    text = file.read(note.MAX_BYTES + 1).decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.startswith("\u2014 ")]
    signed = _cosigned_by([note.parse_signature(line) for line in lines], known)
    named = [one.text for one in known]
    try:
        with client.daemon() as daemon:
            answer = daemon.ask("cosign_audit_checkpoint", checkpoint=signed.raw.decode(), witnesses=named)
            kept: str = answer["checkpoint"]
    except errors.DaemonSilentError:
        import anyio

        kept = anyio.run(_kept, signed, known).raw.decode()
    shown(kept)


def _cosigned_by(signatures: list[note.NoteSignature], known: list[note.Verifier]) -> note.Note:
    """The newest checkpoint of the log's that these cosignatures are of: rows may have come since it was shown."""
    from policy.audit_log import note

    wrong: errors.NoteError | None = None
    for signed in reversed(_stored()):
        origin = note.Checkpoint.parse(signed.text).origin
        given = tuple(one for one in signatures if one.name != origin)
        try:
            # By what was given alone: an older checkpoint may have cosignatures of the same witness already.
            note.Note(signed.text, given).verified(known)
        except errors.NoteError as e:
            wrong = wrong or e
        else:
            return functools.reduce(note.Note.with_signature, given, signed)
    assert wrong is not None
    raise wrong


async def _kept(signed: note.Note, known: list[note.Verifier]) -> note.Note:
    from covenant import daemon_home
    from covenant.keys import identity
    from covenant.stores.audit.durable import DurableAudit

    home = common.home()
    with daemon_home.held(home):
        agent = identity.Identity.load(home).agent
        async with await DurableAudit.open(home, issuer=agent, now_ms=lambda: time.time_ns() // 1_000_000) as log:
            return await log.cosigned(signed, known)


def _newest() -> note.Note:
    """The newest checkpoint: of a running daemon one that covers its newest row, else the last that was kept."""
    from policy.audit_log import note

    try:
        with client.daemon() as daemon:
            rows = daemon.ask("recent_audit", extended=True, limit=1)["events"]
            if rows:
                proof = daemon.ask("prove_audit_inclusion", event_id=rows[0]["id"], extended=True)["proof"]
                return note.Note.parse(proof["checkpoint"].encode())
    except errors.DaemonSilentError:
        pass
    return _stored()[-1]


def _stored() -> list[note.Note]:
    from policy.audit_log import note

    path = common.home() / "audit" / "checkpoints.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    if not lines:
        raise errors.UsageError("the log has no checkpoint yet", hint="run it while the daemon runs", where=str(path))
    found = [note.Note.parse(json.loads(line)["note"].encode()) for line in lines]
    # A later line of one size has more cosignatures.
    return sorted(found, key=lambda one: note.Checkpoint.parse(one.text).size)


def _newest_of_supervisor() -> note.Note:
    from sandbox.audit import checkpoint_row

    state = common.state()
    if not (state / "audit").is_dir():
        raise errors.LedgerError(f"there is no log of a supervisor below `{state}`", hint="set COVENANT_STATE")
    if os.stat(state / "audit").st_uid != os.geteuid():
        raise errors.LedgerError("the supervisor's log is another user's", hint="repeat with sudo", where=str(state))
    try:
        signed = checkpoint_row.make(state)
    except OSError as e:
        raise errors.LedgerError(f"no checkpoint was made: {e.strerror}", where=str(state)) from e
    if signed is None:
        raise errors.UsageError("the log has no row yet", hint="run an agent first", where=str(state / "audit"))
    return signed


def _tree(name: str) -> merkle.Tree:
    """The tree over the rows of a log, from the files."""
    from covenant.cli.audit import read_logs

    return _tree_of(read_logs.read_log(name).events.split(b"\n")[:-1])


def _tree_of(lines: list[bytes]) -> merkle.Tree:
    from policy.audit_log import merkle, truncation

    begun = truncation.frontier(lines[0], None) if lines else None
    begun = begun or merkle.Frontier()
    tree = merkle.Tree(begun.size, begun.hashes)
    for line in lines[1 if begun.size else 0 :]:
        tree.append(merkle.leaf_hash(line))
    return tree


def _wrong_checkpoints(log: LogBytes) -> list[check.Failure]:
    """Checkpoints that the log signed, and that its rows do not lead to."""
    from policy.audit_log import note
    from policy.audit_log import verify as check

    wrong = []
    tree: merkle.Tree | None = None
    for line in (log.checkpoints or b"").split(b"\n")[:-1]:
        try:
            signed = note.Note.parse(json.loads(line)["note"].encode())
            signed.verified([_log_key(log.path.with_name("audit-head"))])
            given = note.Checkpoint.parse(signed.text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, errors.NoteError) as e:
            wrong.append(check.Failure("checkpoint_invalid", "head", f"a stored checkpoint is none: {e}"))
            continue
        tree = tree or _tree_of(log.events.split(b"\n")[:-1])
        if given.size > tree.size:
            message = f"a checkpoint of {given.size} rows was signed, the log had {tree.size}"
        elif 0 < given.size < tree.cut or tree.root(given.size) == given.root:
            continue
        else:
            message = f"the first {given.size} rows do not lead to the root that was signed"
        wrong.append(check.Failure("checkpoint_mismatch", "both", message))
    return wrong


def _missing_checkpoints(log: LogBytes) -> list[check.Failure]:
    """Checkpoints and cosignatures that rows of the log tell of, and that `checkpoints.jsonl` lacks.

    The store writes the row after the file, so a row without its checkpoint means that the file was changed. The head
    signs the rows: who takes the file away cannot take away the row.
    """
    from policy.audit_log import verify as check

    stored = _stored_checkpoints(log)
    missing = []
    for index, line in enumerate(log.events.split(b"\n")[:-1]):
        if b'"audit_checkpoint' not in line or (row := _checkpoint_row(line)) is None:
            continue
        event_id, size, kind = row
        found = stored.get(size)
        if found is None or (root := kind.get("root_hash_hex")) not in (None, found[0]):
            message = f"row {index} says that a checkpoint of {size} rows was signed; `checkpoints.jsonl` has none"
        elif root is None and not _is_cosigned(found[1], kind.get("witness")):
            message = f"row {index} says that a witness cosigned {size} rows; `checkpoints.jsonl` lacks the cosignature"
        else:
            continue
        message += ": put back a copy of the file, or keep audit and audit-head as evidence"
        missing.append(check.Failure("checkpoint_missing", "head", message, index=index, event_id=event_id))
    return missing


def _stored_checkpoints(log: LogBytes) -> dict[int, tuple[str, note.Note]]:
    """By size: the root in hexadecimal and the note, the last line of each size. Lines that are none are left out."""
    from policy.audit_log import note

    found: dict[int, tuple[str, note.Note]] = {}
    for line in (log.checkpoints or b"").split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, errors.NoteError):
            signed = note.Note.parse(json.loads(line)["note"].encode())
            given = note.Checkpoint.parse(signed.text)
            found[given.size] = given.root.hex(), signed
    return found


def _checkpoint_row(line: bytes) -> tuple[str | None, int, dict[str, Any]] | None:
    """The id, the size and the fields of a row about a checkpoint; None of any other row."""
    try:
        row = json.loads(line)
        kind = row["kind"]
        if kind["type"] not in ("audit_checkpoint", "audit_checkpoint_cosigned"):
            return None
        return row.get("event_id"), kind["tree_size"], kind
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # `policy.audit_log.verify` names a line that is no event


def _is_cosigned(signed: note.Note, witness: object) -> bool:
    """Whether the note has a signature of this witness, by the key that the row names, that verifies."""
    from policy.audit_log import note

    try:
        return bool(signed.verified([note.Verifier.parse(str(witness))]))
    except errors.NoteError:
        return False


def _log_key(folder: Path | None = None) -> note.Verifier:
    from policy.audit_log import note

    path = (folder or common.home() / "audit-head") / "checkpoint.vkey"
    try:
        return note.Verifier.parse(path.read_text("ascii"))
    except (OSError, UnicodeDecodeError) as e:
        raise errors.NoteError("the log's checkpoint key cannot be read", where=str(path)) from e


def _witnesses(signed: note.Note) -> list[note.Verifier]:
    """The keys of ``audit-head/witnesses``, one a line, of those that are on the note."""
    from policy.audit_log import note

    path = common.home() / "audit-head" / "witnesses"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = {one.name for one in signed.signatures}
    found = [note.Verifier.parse(line) for line in lines if line.strip() and not line.startswith("#")]
    return [one for one in found if one.name in names]


def shown(text: str) -> None:
    """Print a note, or lines of one."""
    # A note has no control characters but newlines: it was parsed as one, or made here.
    common.say(common.visible(text.removesuffix("\n"), newlines=True))


def text_or_file(given: str) -> str:
    """A key as it was typed, or what the file of that name says."""
    path = Path(given)
    return path.read_text("utf-8").strip() if path.is_file() else given


def _asked(kind: str, **fields: Any) -> dict[str, Any]:
    """One request, with the token that every verb uses."""
    return client.ask(kind, **fields)

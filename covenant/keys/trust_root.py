"""The operator's side of the trust root: the working copy, the pending version, and its installation.

    $COVENANT_HOME/trust/root.json            the present version; it decides nothing
    $COVENANT_HOME/trust/root-00000001.json   each version that was installed from here, for a host that is behind
    $COVENANT_HOME/trust/next.json            version N + 1, as long as signatures are missing
    $COVENANT_STATE/trust/                    the deciding copy (``sandbox.storage.trust_state``), if ours to write

A change of authority is in the supervisor's log before it takes effect.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from covenant.keys import identity
from covenant.keys.signers import Signer
from policy import base58, errors
from policy.signing import change, proposal
from policy.signing import envelope as envelopes
from policy.signing import root as roots
from policy.signing.proposal import Proposal, Side
from policy.signing.root import TrustRoot
from sandbox.audit.log import Ledger
from sandbox.control import revocation, tree_kill
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import State

DIRECTORY = "trust"
WORKING_COPY = "root.json"
PENDING = "next.json"


@dataclass(frozen=True, slots=True)
class Held:
    """The trust root in use, its source, and the state if it came from one."""

    root: TrustRoot
    source: str
    state: State | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a change: ``installed``, or pending until it has the missing signatures in ``sides``.

    ``decides``: installed in the supervisor's state, not only in the working copy. ``enforced`` lists the live runs
    that rested on a key or package that it revokes.
    """

    installed: bool
    decides: bool
    proposal: Proposal
    sides: tuple[Side, Side]
    changes: tuple[str, ...]
    place: str
    enforced: revocation.Enforced = revocation.NOTHING


@contextlib.contextmanager
def opened(home: Path, supervisor: Path, *, fix: str = "") -> Iterator[Held]:
    """Yield the trust root of the supervisor's state, else the operator's working copy, which decides nothing.

    Its validity period is not checked here: ``trust.verify`` does that. ``fix`` is another fix where there is none.

    Raises:
        errors.TrustError: there is none, it is malformed, or the state's was removed.
    """
    with contextlib.ExitStack() as stack:
        # Another uid's state is not ours to read; damage in our own is an error.
        if is_ours(supervisor):
            state = stack.enter_context(State(supervisor))
            # If the state's root was removed, an older working copy does not replace it.
            if state.began():
                yield Held(state.present_root(), str(supervisor), state)
                return
        raw = read(home, WORKING_COPY)
        if raw is None:
            raise errors.TrustError(
                "there is no trust root",
                hint=fix or "covenant trust init --key NAME",
                where=str(home),
            )
        yield Held(TrustRoot.parse(raw), str(home / DIRECTORY / WORKING_COPY), None)


def first(
    home: Path, state: State | None, raw: bytes, signers: Sequence[str], *, now_ms: int, when: Callable[[int], str]
) -> TrustRoot:
    """Install the first root of this home, and of the state if given, which has none yet.

    Raises:
        errors.TrustError: it is not valid now, or, for a state, not version 1.
    """
    root = TrustRoot.load(raw, now_ms)
    if state is not None and root.version != 1:
        raise errors.TrustError(
            f"the first trust root of a state is version 1, not {root.version}",
            hint="import version 1 first, then each of the others: covenant trust export --version 1 FILE",
        )
    if state is not None:
        empty = root.document.model_copy(update={"keys": ()})
        changes = change.describe(empty, root.document, when)
        state.init_root(raw, now_ms, before=lambda made: _log(state, home, None, made, signers, changes, now_ms))
    _keep(home, root.version, raw, decides=state is not None)
    return root


def advance(
    held: Held,
    home: Path,
    wanted: Proposal,
    doors: Sequence[Signer],
    *,
    now_ms: int,
    when: Callable[[int], str],
    spare: Sequence[Signer] = (),
    discard: bool = False,
    before_signing: Callable[[int, Sequence[str]], None] = lambda version, changes: None,
) -> Outcome:
    """Sign version N + 1 through these doors; install it if it has all signatures, else keep it as pending.

    ``spare`` doors sign only if a signature is missing without them: a key that the version itself adds.
    ``before_signing`` gets the version and a description of its changes, and may raise.

    (1), (2) ``prepared``;
    (3) signatures that count are added to the existing ones;
    (4) if complete: first the log, then the state if it is ours, then the working copy;
    (5) else it is stored as pending, atomically.

    Raises:
        errors.TrustError: (1), (2), or the version is refused by the present one.
        errors.LedgerError: the log takes no line; nothing was changed.
        errors.KeyFileError, errors.AgentError: a key did not sign.
    """
    with _directory(home) as directory, atomic_file.locked(directory, where=str(home), error=errors.TrustError):
        moment = _moment(held, now_ms)
        # (1), (2)
        wanted = prepared(held, home, wanted, doors, now_ms=now_ms, spare=spare, discard=discard)
        usable = wanted.signers(held.root, moment)
        # (3) signatures
        changes = change.describe(held.root.document, wanted.document, when)
        if doors:
            before_signing(wanted.document.version, changes)
        for door in doors:
            wanted = wanted.signed_by(door.signature(wanted.envelope))
        for door in spare:
            if door.key.keyid in usable and not wanted.complete(held.root, moment):
                wanted = wanted.signed_by(door.signature(wanted.envelope))
        sides = wanted.sides(held.root, moment)
        if wanted.complete(held.root, moment):
            # (4) the log, the state, the working copy
            signers = sorted({*sides[0].signed, *sides[1].signed})
            enforced = revocation.NOTHING
            # Before the verification below: among busy agents that alone took a second.
            with tree_kill.urgent():
                root = held.root.successor(wanted.encode(), moment)
                if held.state is not None:
                    enforced = install(held.state, home, held.root, root, signers, changes, now_ms)
            _keep(home, root.version, root.raw, decides=held.state is not None)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(PENDING, dir_fd=directory)
            place = str(held.state.path) if held.state is not None else str(home / DIRECTORY / WORKING_COPY)
            return Outcome(True, held.state is not None, wanted, sides, changes, place, enforced)
        # (5) kept
        atomic_file.replace(directory, PENDING, wanted.encode())
        return Outcome(False, False, wanted, sides, changes, str(home / DIRECTORY / PENDING))


def prepared(
    held: Held,
    home: Path,
    wanted: Proposal,
    doors: Sequence[Signer],
    *,
    now_ms: int,
    spare: Sequence[Signer] = (),
    discard: bool = False,
) -> Proposal:
    """Return version N + 1 with the signatures that count, after the checks of ``advance`` that need no signature.

    A verb calls it before it asks the operator, so that no question is asked about a version that is refused.

    (1) it can follow the present version, and no other proposal is pending, unless ``discard`` is set;
    (2) each door's key is one that the version needs: no signature is useless, and there is one.

    Raises:
        errors.TrustError: (1) or (2).
    """
    # (1) it can follow
    moment = _moment(held, now_ms)
    check_holds_still(held, home)
    held.root.check_follows(wanted.document)
    kept = None if discard else pending(home)
    if kept is not None and kept.document.version == wanted.document.version:
        if kept.payload_digest != wanted.payload_digest:
            raise errors.TrustError(
                f"another version {kept.document.version} is waiting for signatures",
                hint="complete it with covenant trust import, or give --discard-pending",
                where=str(home / DIRECTORY / PENDING),
            )
        wanted = wanted.merged(kept, held.root, moment)
    wanted = wanted.merged(wanted, held.root, moment)
    # (2) each key is needed
    usable = wanted.signers(held.root, moment)
    for door in doors:
        if door.key.keyid not in usable:
            raise errors.TrustError(
                f"the key `{door.name}` does not sign trust roots, in version {held.root.version} or in the next",
                hint="covenant trust show lists the keys that do",
            )
    if not wanted.envelope.signatures and not doors and not any(door.key.keyid in usable for door in spare):
        raise errors.TrustError("nobody who may sign this version has signed it", hint="give --sign-with NAME")
    return wanted


def _moment(held: Held, now_ms: int) -> int:
    """Return the time that counts: never before the latest that the state knows."""
    return now_ms if held.state is None else max(now_ms, held.state.greatest_time_ms())


def pending(home: Path) -> Proposal | None:
    """Return the version that waits for signatures.

    Raises:
        errors.TrustError: its file is malformed or unsafe.
    """
    raw = read(home, PENDING)
    return None if raw is None else proposal.decode(raw)


def read(home: Path, name: str) -> bytes | None:
    """Return a file of the home's trust folder; None if there is none.

    Raises:
        errors.TrustError: it is unsafe, or larger than a trust root.
    """
    if not (home / DIRECTORY).exists():
        return None
    with _directory(home) as directory:
        where = str(home / DIRECTORY)
        return atomic_file.read(directory, name, max_bytes=roots.MAX_BYTES, where=where, error=errors.TrustError)


def version_name(version: int) -> str:
    """Return the file name of a version in the trust folder."""
    return f"root-{version:08d}.json"


def refuse_identity(home: Path, key: envelopes.PublicKey) -> None:
    """Refuse the key of the local identity: it identifies callers and signs no manifest (decisions.md, Signing doors).

    Raises:
        errors.TrustError: this is its key.
    """
    if base58.encode(key.raw) == identity.issuer(home)["pubkey"]:
        raise errors.TrustError(
            "this is the key of the local identity, which signs no manifest and no root",
            hint="make a key for the operator: covenant keys new NAME",
        )


def check_holds_still(held: Held, home: Path) -> None:
    """Check, under the lock of the home, that no other process changed the root since it was read.

    Raises:
        errors.TrustError: another process did.
    """
    if held.state is not None:
        still = held.state.root_version() == held.root.version
    else:
        still = read(home, WORKING_COPY) == held.root.raw
    if not still:
        raise errors.TrustError("the trust root was replaced in the meantime", hint="look at it, then repeat")


def install(
    state: State,
    home: Path,
    present: TrustRoot,
    root: TrustRoot,
    signers: Sequence[str],
    changes: Sequence[str],
    now_ms: int,
) -> revocation.Enforced:
    """Replace ``present`` in the state by ``root``, which ``present.successor`` returned.

    (1) stop and mark the runs that rest on a key or package that it revokes: running agents would keep the CPUs from
        the disk writes
    (2) write the log, then the root
    (3) write the row with those runs, and end them, even if (2) failed

    Raises:
        errors.TrustError: the state has another root than ``present``, or it cannot be written.
        errors.LedgerError: the log takes no line; the root is not changed.
    """

    # Another home may share the state, so the line is written under its lock: then the line is true.
    def put() -> None:
        try:
            state.replace_root(
                root.raw, now_ms, before=lambda made: _log(state, home, present, made, signers, changes, now_ms)
            )
        except OSError as e:
            raise errors.StateError(f"the record of versions cannot be written: {e.strerror}") from e

    # Revoked agents may use every CPU; they are stopped even if another part of the step fails.
    with tree_kill.urgent():
        # A root that cannot follow the present one must stop no run.
        state.still_holds(present.version)
        enforced = enforce(state, home, root, operator=signers[0] if signers else None, install=put)
    if enforced.refused is None:
        return enforced
    if state.root_version() == root.version:  # the root is installed and valid, even if a later write failed
        failed = (*enforced.failed, f"version {root.version} holds, but {enforced.refused.message}")
        return structs.replace(enforced, failed=failed, refused=None)
    raise _ended_all_the_same(enforced.refused, enforced)


def enforce(
    state: State,
    home: Path,
    root: TrustRoot,
    *,
    operator: str | None = None,
    install: Callable[[], object] | None = None,
) -> revocation.Enforced:
    """End the live runs of this state that rest on a key or package that ``root`` revokes, even if the log takes no
    line.

    ``install`` installs a root that is not in force yet (``revocation.enforce``).
    """
    with contextlib.ExitStack() as stack:

        def write(fields: Mapping[str, Any]) -> None:
            ledger = stack.enter_context(open_ledger(state))
            row = {"operator": operator, **fields}
            ledger.append("runs_revoked", row, issuer=identity.issuer(home), now_ms=int(time.time() * 1000))

        return revocation.enforce(state.path / "runs", root, write=write, install=install)


def _ended_all_the_same(refused: errors.CovenantError, enforced: revocation.Enforced) -> errors.CovenantError:
    """Return the error for a version that was not installed, with the runs that were ended. They stay ended although
    the package may still start again."""
    runs = ", ".join(one.run_id for one in enforced.ended)
    failed = "".join(f"; not done: {one}" for one in enforced.failed)
    return type(refused)(
        f"{refused.message}; the version does not hold, and what it revokes may start again; the runs "
        f"that rested on it were ended all the same: {runs}{failed}",
        hint=refused.hint or "mend it, then repeat the command",
        where=refused.where,
    )


def open_ledger(state: State) -> Ledger:
    """Open the log of this state."""
    return Ledger.open(state.path / "audit", head=state.path / "audit-head" / "head.json")


def _log(
    state: State,
    home: Path,
    before: TrustRoot | None,
    root: TrustRoot,
    signers: Sequence[str],
    changes: Sequence[str],
    now_ms: int,
) -> None:
    fields = {
        "operator": signers[0] if signers else None,
        "version_from": None if before is None else before.version,
        "version_to": root.version,
        "digest": hashlib.sha256(root.raw).hexdigest(),
        "signers": list(signers),
        "changes": list(changes),
    }
    with open_ledger(state) as ledger:
        ledger.append("trust_changed", fields, issuer=identity.issuer(home), now_ms=now_ms)


def _keep(home: Path, version: int, raw: bytes, *, decides: bool) -> None:
    with _directory(home) as directory:
        try:
            # Overwrites an existing file: the leftover of a killed step was never in force, and must not be exported.
            atomic_file.replace(directory, version_name(version), raw)
            atomic_file.replace(directory, WORKING_COPY, raw)
        except OSError as e:
            # The message must not suggest that a version in force was not installed.
            done = f"version {version} is installed, but " if decides else ""
            raise errors.TrustError(f"{done}the working copy cannot be written: {e.strerror}", where=str(home)) from e


@contextlib.contextmanager
def _directory(home: Path) -> Iterator[int]:
    parent = atomic_file.open_directory(home, error=errors.HomeError)
    try:
        fd = atomic_file.open_subdirectory(parent, DIRECTORY, where=str(home), make=True, error=errors.TrustError)
    finally:
        os.close(parent)
    try:
        yield fd
    finally:
        os.close(fd)


def is_ours(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False

"""Make a package's envelope: the part that ``manifest sign`` and ``dev`` share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys import keystore
from policy import data, errors
from policy import package as packages
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.signing import envelope as envelopes
from policy.signing import proposal, revocation
from policy.signing import root as roots
from policy.signing import statement as statements
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import State

# The most that a signer's clock may be ahead of a verifier's before a fresh envelope is "not valid yet".
BACKDATE_MS = 5 * 60 * 1000
DEFAULT_ROOT_LIFETIME_MS = 365 * statements.DAY_MS
DEV_NAME = "dev@local"
DEV_LIFETIME_MS = statements.DAY_MS


@dataclass(frozen=True, slots=True)
class Terms:
    """The signer's choices. Times and the serial in Unix milliseconds; ``audience`` None means any host."""

    serial: int
    lifetime_ms: int = statements.DEFAULT_LIFETIME_MS
    audience: str | None = None
    approve_unlimited: bool = False
    parent_digest: str | None = None


def statement(package: packages.Package, manifest: Manifest, terms: Terms, *, now_ms: int) -> statements.Statement:
    """Make the statement over a package, and refuse one that must not be signed.

    Raises:
        errors.ManifestError: ``resources.network`` is not written, or a lifetime is unlimited without approval.
        errors.PackageError: an editor, interpreter or version control left files in the package.
        errors.SignatureError: a term is outside the limits of a statement.
    """
    parse.require_network(manifest)
    if manifest.lifetime.unlimited and not terms.approve_unlimited:
        raise errors.ManifestError(
            "the manifest asks for an unlimited lifetime",
            hint="sign with --approve-unlimited if that is meant",
            where=manifest.where("lifetime.unlimited"),
        )
    left = packages.droppings(package.digests)
    if left:
        raise errors.PackageError(
            f"`{left[0]}` was left by a program and would be signed",
            hint=f"remove it ({len(left)} such files), then sign",
            where=left[0],
        )
    return statements.make(
        {
            "agent_id": manifest.agent.id,
            "serial": terms.serial,
            "not_before": max(now_ms - BACKDATE_MS, 0),
            "expires_at": now_ms + terms.lifetime_ms,
            "audience": terms.audience,
            "roles_version": data.roles().version,
            "deny_version": data.deny().version,
            "parent_digest": terms.parent_digest,
            "approve_unlimited": terms.approve_unlimited,
            "unknown_sections": tuple(manifest.unknown_sections),
            "subjects": dict(package.digests),
        }
    )


def sign(statement: statements.Statement, key: Ed25519PrivateKey) -> bytes:
    """Return the bytes of an envelope with one signature.

    Raises:
        errors.PackageError: it has so many or so long names that a verifier would not read it.
    """
    return encoded(envelopes.sign(statement.encode(), envelopes.IN_TOTO_PAYLOAD_TYPE, [key]))


def encoded(envelope: envelopes.Envelope) -> bytes:
    """Return the envelope's bytes.

    Raises:
        errors.PackageError: as ``sign``.
    """
    raw = envelope.encode()
    packages.check_envelope_size(len(raw), hint="take files out of the package, or give them shorter names")
    return raw


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a package's directory: its files are read and the envelope is written through the same descriptor.

    Raises:
        errors.PackageError: it is missing, a symlink, or no directory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        # O_NOFOLLOW with O_DIRECTORY returns ENOTDIR for a symlink.
        hint = "give the directory that it leads to" if path.is_symlink() else f"have uid {os.geteuid()} read it"
        raise errors.PackageError(f"package `{path}` cannot be opened: {e.strerror}", hint=hint, where=str(path)) from e
    try:
        yield fd
    finally:
        os.close(fd)


def write_envelope(directory: Path | int, raw: bytes) -> None:
    """Write the envelope beside the manifest atomically; ``directory`` is a path or a descriptor from ``opened``.

    Raises:
        errors.PackageError: it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        fd = directory if isinstance(directory, int) else stack.enter_context(opened(directory))
        try:
            atomic_file.replace(fd, packages.ENVELOPE_NAME, raw, mode=0o644)
        except OSError as e:
            raise errors.PackageError(f"`{packages.ENVELOPE_NAME}` cannot be written: {e.strerror}") from e


def discard_unfinished(directory: int) -> None:
    """Remove the temporary file of a killed ``write_envelope``, which would be signed as a file of the package."""
    # A directory, or another user's package: reading it gives the proper error.
    with contextlib.suppress(OSError):
        os.unlink(atomic_file.temporary_name(packages.ENVELOPE_NAME), dir_fd=directory)


def new_root(name: str, key: Ed25519PrivateKey, *, now_ms: int, **options: Any) -> bytes:
    """Return version 1 of a trust root with one key, signed by it; ``options`` are those of ``first_root``.

    Raises:
        errors.TrustError: the name, a pattern or a time is not acceptable.
    """
    made = first_root(name, envelopes.PublicKey.of(key), now_ms=now_ms, **options)
    return made.signed_by(made.envelope.sign(key)).encode()


def first_root(
    name: str,
    key: envelopes.PublicKey,
    *,
    now_ms: int,
    lifetime_ms: int = DEFAULT_ROOT_LIFETIME_MS,
    agents: tuple[str, ...] = ("*",),
    roles: tuple[str, ...] = ("*",),
    approve_unlimited: bool = True,
    version: int = 1,
) -> proposal.Proposal:
    """Return an unsigned trust root with one key, which signs it and its successor.

    Raises:
        errors.TrustError: the name, a pattern or a time is not acceptable.
    """
    bounds = {"not_before": max(now_ms - BACKDATE_MS, 0), "expires_at": now_ms + lifetime_ms}
    entry = {
        "name": name,
        "public": key.raw.hex(),
        "scope": {"agents": agents, "roles": roles, "approve_unlimited": approve_unlimited},
        "root": True,
        "threshold": 1,
        **bounds,
    }
    revoked = revocation.NONE.model_dump()
    return proposal.make({"version": version, "threshold": 1, "keys": (entry,), "revoked": revoked, **bounds})


def check_first_root(raw: bytes, wanted: roots.RootDocument) -> None:
    """Refuse a working copy that differs from ``wanted``, which was just made, in more than its dates.

    Another or an additional key, a wider scope or a longer life would be installed unnoticed.

    Raises:
        errors.TrustError: it does.
    """
    if _without_date(roots.TrustRoot.parse(raw).document) != _without_date(wanted):
        raise errors.TrustError(
            "the working copy of the trust root is not version 1 "
            f"with the key `{wanted.keys[0].name}` and these options",
            hint="init with the key and the options that it lists, or move $COVENANT_HOME/trust aside",
        )


def _without_date(root: roots.RootDocument) -> dict[str, Any]:
    """Return a root's document with every time relative to its start."""
    document = root.model_dump()
    start = document["not_before"]
    for part in (document, *document["keys"]):
        part["not_before"], part["expires_at"] = part["not_before"] - start, part["expires_at"] - start
    return document


def dev(
    package: packages.Package, manifest: Manifest, state: State, *, host: str, now_ms: int
) -> tuple[packages.Package, State]:
    """Sign a package with the local dev key. Returns it, and the state to verify and accept it in.

    For ``covenant dev``, as the supervisor's uid. The key may sign only this agent id, only for this host, for a day;
    no other state knows it. An operator's envelope in the package is ignored. The caller closes the state, and verifies
    with ``dev_state.trust_root(now_ms)`` as for any package.

    Raises:
        errors.CovenantError: as ``statement``, ``keystore.dev_key`` and ``State``.
    """
    agent_id = manifest.agent.id
    dev_state = state.dev(agent_id)
    try:
        key = keystore.dev_key(dev_state.path)
        _ensure_dev_root(dev_state, key, agent_id, now_ms)
        last = dev_state.accepted(agent_id)
        # The serial grows even with two edits in a millisecond, or after the clock was set back.
        serial = max(now_ms, last.serial + 1 if last else 0)
        terms = Terms(
            serial=serial,
            lifetime_ms=DEV_LIFETIME_MS,
            audience=host,
            approve_unlimited=manifest.lifetime.unlimited,
        )
        signed = package.with_envelope(sign(statement(package, manifest, terms, now_ms=now_ms), key))
    except BaseException:
        dev_state.close()
        raise
    return signed, dev_state


def _ensure_dev_root(state: State, key: Ed25519PrivateKey, agent_id: str, now_ms: int) -> None:
    """Ensure a root for the dev key that is valid for another day; an older one gets a next version."""
    version = state.root_version()
    if version:
        with contextlib.suppress(errors.TrustError):
            state.trust_root(now_ms + DEV_LIFETIME_MS)
            return
    raw = new_root(DEV_NAME, key, now_ms=now_ms, version=version + 1, agents=(agent_id,))
    if version:
        state.replace_root(raw, now_ms)
    else:
        state.init_root(raw, now_ms)

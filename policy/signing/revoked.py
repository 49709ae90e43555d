"""Decide whether a trust root has revoked a signed statement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from policy.signing import threshold

if TYPE_CHECKING:
    from policy.signing.root import Signer, TrustRoot


class Stated(Protocol):
    """The fields of a statement that a revocation is decided by."""

    @property
    def agent_id(self) -> str:
        """Whose it is."""

    @property
    def serial(self) -> int:
        """Its place among those of the agent."""

    @property
    def approve_unlimited(self) -> bool:
        """Whether it approves a lifetime without an end."""


def revoked(root: TrustRoot, payload_digest: str, statement: Stated, signers: Iterable[Signer]) -> str | None:
    """Why what was accepted once must not go on under ``root``, in one lower-case line; None when it may.

    For runs that are live when a root is replaced: ``signers`` are those that counted when it started. A key that
    was merely taken out of the root starts nothing more and ends nothing; one that was revoked ends what rested on
    its signature: where the others are too few without it, or none of them may approve a lifetime without an end.
    """
    lists = root.document.revoked
    reason = lists.package(payload_digest, statement.agent_id, statement.serial)
    if reason is not None:
        return reason
    before = tuple(signers)
    out = [(s, entry) for s in before if (entry := lists.key(s.keyid)) is not None]
    if not out:
        return None
    left = threshold.counting(s for s in before if lists.key(s.keyid) is None)
    signer, entry = out[0]
    if not left:
        return f"the key of `{signer.name}`, who signed, was revoked: {entry.reason}"
    if statement.approve_unlimited and _approver(before) and not _approver(left):
        return f"the key of `{signer.name}`, who approved the unlimited lifetime, was revoked: {entry.reason}"
    return None


def _approver(signers: Iterable[Signer]) -> bool:
    return any(s.scope.approve_unlimited for s in signers)

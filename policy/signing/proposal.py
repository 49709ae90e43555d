"""A next version of the trust root on its way: who signed it so far, and who has to before it can be installed.

A proposal is the same envelope as a root, with too few signatures. It decides nothing: only ``TrustRoot.successor``
makes a root of it.
"""

from __future__ import annotations

import hashlib

from msgspec import Struct, structs

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import root as roots
from policy.signing import strict_json, threshold

# The payload in base64, and room for the signatures of both versions, must be within what a reader takes.
_MAX_PAYLOAD_BYTES = roots.MAX_BYTES * 3 // 4 - 64 * 1024


class Side(Struct, frozen=True):
    """One version's say: ``signed`` of its keys, ``open`` that could yet sign, and how many are ``missing``.

    ``missing`` is None when all of them together would be too few, which is so where keys have ended.
    """

    version: int
    signed: tuple[str, ...]
    open: tuple[str, ...]
    missing: int | None


class Proposal(Struct, frozen=True):
    """A document and the signatures that it has."""

    document: roots.RootDocument
    envelope: envelopes.Envelope

    @property
    def payload_digest(self) -> str:
        """Hex SHA-256 of what is signed: two proposals with one digest are the same."""
        return hashlib.sha256(self.envelope.payload).hexdigest()

    def encode(self) -> bytes:
        """The bytes to keep or to hand on; there is a signature at least."""
        return self.envelope.encode()

    def sides(self, present: roots.TrustRoot, now_ms: int) -> tuple[Side, Side]:
        """Return the present root and the proposed one, each as it describes itself."""
        one, other = (_side(document, self.envelope, now_ms) for document in (present.document, self.document))
        return one, other

    def complete(self, present: roots.TrustRoot, now_ms: int) -> bool:
        """Whether no signature is missing."""
        return all(side.missing == 0 for side in self.sides(present, now_ms))

    def signers(self, present: roots.TrustRoot, now_ms: int) -> dict[str, envelopes.PublicKey]:
        """Key id to key of everybody whose signature this could use."""
        keys = (*present.document.root_keys_at(now_ms), *self.document.root_keys_at(now_ms))
        return {k.key.keyid: k.key for k in keys}

    def signed_by(self, signature: envelopes.Signature) -> Proposal:
        """With one more signature; one by the same key id is replaced."""
        return Proposal(self.document, self.envelope.signed_by(signature))

    def merged(self, other: Proposal, present: roots.TrustRoot, now_ms: int) -> Proposal:
        """This one with those signatures of ``other`` that verify and can count; both have one payload.

        Signatures of strangers are dropped on the way: sixteen of them would leave no room for those who may sign.

        Raises:
            ValueError: they have two payloads.
        """
        if other.envelope.payload != self.envelope.payload:
            raise ValueError("two payloads")
        message = self.envelope.pae()
        keys = self.signers(present, now_ms)
        kept: dict[str, envelopes.Signature] = {}
        for signature in (*self.envelope.signatures, *other.envelope.signatures):
            for keyid in [signature.keyid] if signature.keyid else list(keys):
                key = keys.get(keyid)
                if key is not None and key.verifies(signature.sig, message):
                    kept[keyid] = envelopes.Signature(keyid, signature.sig)
        signatures = tuple(kept[keyid] for keyid in sorted(kept))
        return Proposal(self.document, structs.replace(self.envelope, signatures=signatures))


def propose(document: roots.RootDocument) -> Proposal:
    """Make a proposal without signatures.

    Raises:
        errors.TrustError: so large that no reader would take it.
    """
    payload = document.encode()
    if len(payload) > _MAX_PAYLOAD_BYTES:
        raise errors.TrustError(
            f"the trust root would be larger than {roots.MAX_BYTES} bytes",
            hint="revoke serials instead of single manifests, or give keys fewer patterns",
        )
    return Proposal(document, envelopes.Envelope(payload, roots.PAYLOAD_TYPE, ()))


def decode(raw: bytes) -> Proposal:
    """The proposal in ``raw``. Nothing about it has been verified.

    Raises:
        errors.TrustError: not one closed trust root, or not in the bytes that its writer would write.
    """
    document, signed = roots.decode(raw)
    # Later signers have read the document, so the bytes may say nothing that the document does not.
    if document.encode() != signed.payload:
        raise errors.TrustError("the trust root is not written in its canonical form")
    return Proposal(document, signed)


def make(values: dict[str, object]) -> Proposal:
    """A proposal of a document given by its fields.

    Raises:
        errors.TrustError: it would not be a trust root.
    """
    try:
        return propose(strict_json.validate(roots.RootDocument, values))
    except strict_json.MalformedJsonError as e:
        raise errors.TrustError(f"the trust root cannot be made: {e}") from None


def _side(document: roots.RootDocument, signed: envelopes.Envelope, now_ms: int) -> Side:
    keys = document.root_keys_at(now_ms)
    made = roots.made(keys, signed)
    others = tuple(k for k in keys if k not in made)
    return Side(
        document.version,
        tuple(k.name for k in made),
        tuple(k.name for k in others),
        threshold.missing(made, others, least=document.threshold),
    )

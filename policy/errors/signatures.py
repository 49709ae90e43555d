"""Why a signature does not make a package acceptable here: rule 2."""

from __future__ import annotations

from policy.errors.operator import OperatorError


class SignatureError(OperatorError):
    """The envelope does not verify: rule 2."""

    code = "rule_2_signature"


class UnsignedError(SignatureError):
    """The package has no envelope: rule 2."""

    code = "unsigned"


class UnknownKeyError(SignatureError):
    """No signature was made by a key that the trust root lists for this agent."""

    code = "unknown_key"


class RevokedError(SignatureError):
    """The trust root has revoked the key that signed, this signed manifest, or the agent's serials up to this one.

    What rests on it does not start, and what runs already is ended with everything that it started.
    """

    code = "revoked"


class ExpiredError(SignatureError):
    """The envelope is not valid at this time."""

    code = "envelope_expired"


class AudienceError(SignatureError):
    """The envelope was signed for another host."""

    code = "wrong_audience"


class DigestMismatchError(SignatureError):
    """A file of the package is not the file that was signed."""

    code = "digest_mismatch"


class SerialError(SignatureError):
    """The serial is older than one already accepted, reused for other bytes, or too far ahead."""

    code = "serial_rollback"

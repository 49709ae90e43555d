"""Signed documents: DSSE envelopes, the trust root, statements of packages, approvals, leases and revocations."""

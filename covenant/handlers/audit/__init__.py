"""Requests about the audit log: proofs, drift, integrity and provenance."""

"""Capability tokens, decided without I/O: their bytes, what a scope admits, when one grant is less than another, and
whether a chain of grants leads to the daemon's identity. Covenant version 1, section 7; docs/capabilities.md."""

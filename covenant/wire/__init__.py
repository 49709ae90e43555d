"""Definitions that clients and the daemon share: the types, messages and frames of Covenant version 1."""

"""Operators over all runs: list, kill, logs, metrics and revocation."""

"""Verbs that ask the daemon."""

"""Verbs that explain, compare and prove policies."""

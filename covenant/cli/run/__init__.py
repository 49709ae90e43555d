"""Verbs that start and manage runs."""

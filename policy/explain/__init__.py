"""Policies in words, and the difference between two."""

"""Requests about capabilities and peers."""

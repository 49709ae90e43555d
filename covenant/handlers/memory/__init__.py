"""Requests about memory records and their maintenance."""

"""Requests about messages between agents."""

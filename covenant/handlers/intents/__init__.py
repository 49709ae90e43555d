"""Intents from submission to result."""

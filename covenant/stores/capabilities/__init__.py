"""Grants of capabilities: who may do what, until when, how often, and what was taken back."""

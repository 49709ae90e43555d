"""Decide about requests that are held for an operator: which lease may be given, and which one is live."""

"""Decide what a workspace shows, what has changed in it, and which of the changes may be applied."""

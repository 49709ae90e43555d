"""Volumes: named file systems of the state that outlive runs."""

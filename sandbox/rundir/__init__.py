"""Directories, labels, marks and locks of live runs."""

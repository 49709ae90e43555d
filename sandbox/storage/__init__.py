"""Private files, trust state and packages on disk."""

"""One run from the bytes of its package to its answer."""

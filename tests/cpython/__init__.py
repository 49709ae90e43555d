"""CPython's own test suite in a session of Covenant, and in plain runsc of the same root."""

"""Units of systemd: their syntax, their settings, and the calls of their filters."""

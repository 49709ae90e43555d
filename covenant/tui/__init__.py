"""The terminal screens of ``covenant tui``: what the daemon and the supervisor know, live, and acts that ask first."""

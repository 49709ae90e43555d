"""Facts of this machine, its runsc and its memory."""

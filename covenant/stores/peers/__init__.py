"""Who may connect: tokens by their digests, and the operator's own in a file."""

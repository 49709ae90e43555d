"""The registry of peers: digests of their tokens, and the operator's token in a file."""

"""The service gate of a run: models behind names of its own, without a key inside the sandbox."""

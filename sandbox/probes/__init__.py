"""Acts that a policy forbids, tried in a sandbox."""

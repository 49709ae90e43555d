"""One request to the supervisor, from its frame to its answer."""

"""The daemon's runtime for agents: their packages, the client of the supervisor, and Hermes."""

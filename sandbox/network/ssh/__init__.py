"""The ssh-agent service of a run: a gate that reads the agent protocol, and the desk of the shim that signs."""

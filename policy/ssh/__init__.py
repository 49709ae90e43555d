"""The ssh-agent service: keys of hosts, messages of the agent protocol, and which signatures are given."""

"""The daemon's stores: each is an interface with a durable implementation and one in memory."""

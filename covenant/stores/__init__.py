"""What the daemon keeps: each store is an interface with a durable implementation and one in memory."""

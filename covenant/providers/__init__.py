"""What the daemon asks of others: embedders, tools, a chain."""

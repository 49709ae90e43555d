"""External services of the daemon: embedders, tools, a chain."""

"""Sets that grants are made of: paths, addresses, host names and spans."""

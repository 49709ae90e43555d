"""Create, start, wait for and delete one sandbox."""

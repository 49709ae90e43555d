"""The clients of the supervisor: the command line, and the daemon with its protocols."""

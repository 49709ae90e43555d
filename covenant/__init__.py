"""Who talks to the supervisor: the command line, and later the daemon and its protocols."""

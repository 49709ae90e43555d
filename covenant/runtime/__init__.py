"""What runs agents for the daemon: their packages, the supervisor that is asked for each run, and Hermes."""

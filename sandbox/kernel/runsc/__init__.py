"""The runsc command and its logs."""

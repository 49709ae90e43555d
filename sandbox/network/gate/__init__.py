"""Processes of gates: prefork, confinement and cgroup."""

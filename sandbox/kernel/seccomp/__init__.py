"""Seccomp filters: load, dump and compare."""

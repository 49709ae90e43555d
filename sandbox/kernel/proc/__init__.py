"""Processes: spawn, confine, signal, prioritize and wait."""

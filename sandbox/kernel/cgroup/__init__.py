"""cgroup v1 and v2: limits, counters, delegation and kill."""

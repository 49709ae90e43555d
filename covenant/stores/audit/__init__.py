"""The daemon's audit log: rows in version 1's bytes, chained, written in groups, provable, and cut without a gap."""

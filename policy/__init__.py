"""Decide the policy of an agent from given bytes, times and host facts. This package fetches nothing."""

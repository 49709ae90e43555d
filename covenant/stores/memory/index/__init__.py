"""The search index of the memory store."""

"""Memory: records in three tiers, found again by what they are like and by their words (docs/memory.md)."""

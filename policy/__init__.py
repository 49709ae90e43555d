"""What an agent may have: decided from bytes, times and host facts that are given, never fetched."""

"""The inject gate of a run: ends the TLS of chosen hosts, and adds a secret to the requests that are granted."""

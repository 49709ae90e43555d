"""The manifest's JSON schema and reference page."""

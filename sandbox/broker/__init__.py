"""Requests of a running agent: credentials, children and packages."""

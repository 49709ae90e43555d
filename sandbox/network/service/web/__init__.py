"""Searches of the web and pages of it, behind the service gate's names `search.covenant` and `fetch.covenant`."""

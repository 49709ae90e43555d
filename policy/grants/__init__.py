"""Grants, one module a domain: the sets that a manifest grants, compared, intersected and written."""

"""Verbs of an operator: keys, manifests, trust root and vault."""

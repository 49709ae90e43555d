"""Embedders of the memory store, and how one is picked."""

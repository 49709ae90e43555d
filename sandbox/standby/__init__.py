"""Sandboxes that are started ahead and wait for one intent."""

"""Layers of the supervisor's store, and the root images that runs are given of them."""

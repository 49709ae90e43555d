"""Receipts for what was used, and the batches that they are settled in."""

"""Handlers: one function for each request, over any adapter."""

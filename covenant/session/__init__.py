"""Make a package for a typed command: a profile and options become a manifest."""

"""The command line: ``covenant`` with its verbs by who uses them, and how they print and fail."""

"""The manifest: its sections and fields, its parser, and messages that name the line of a fault."""

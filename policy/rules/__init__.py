"""The nine rules by which a manifest is accepted, and those of succession, commands and calls of tools."""

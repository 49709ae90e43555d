"""File systems, id maps, Landlock and secret files."""

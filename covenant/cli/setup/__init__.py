"""``covenant setup``: the parts of an installation outside its Python environment."""

"""The files that an agent's root is made of."""

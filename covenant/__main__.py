"""``python -m covenant``: the same as the console script."""

from covenant.cli.main import entry

entry()

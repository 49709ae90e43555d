"""Show an agent's stderr while it runs: each line as it comes, and at its end what is left."""

from __future__ import annotations

import contextlib

from covenant.cli import common


class ShownStderr:
    """The stderr of one run. ``waiting`` is what is shown until the first line: the spinner."""

    def __init__(self) -> None:
        self.waiting = contextlib.ExitStack()
        self._shown = ""

    def show(self, lines: str) -> None:
        """Show the next whole lines."""
        self.waiting.close()
        self._shown += lines
        common.remark_stderr(lines)

    def show_rest(self, whole: str) -> None:
        """Show what the answer has of stderr and was not shown yet."""
        common.remark_stderr(whole.removeprefix(self._shown))

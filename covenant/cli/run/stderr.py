"""Show an agent's stderr while it runs: each line as it comes, and at its end what is left; and what it waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

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

    def show_asked(self, held: Mapping[str, Any]) -> None:
        """Show a request that waits for an operator, and the command that grants it."""
        self.waiting.close()
        words = f"waits for an operator, at most {held.get('seconds')} s: {held.get('asks')} {held.get('target')}"
        common.say(common.visible(words), err=True)
        common.say(common.visible(f"  to grant it: covenant approvals grant {held.get('request')} --once"), err=True)

    def show_rest(self, whole: str) -> None:
        """Show what the answer has of stderr and was not shown yet."""
        common.remark_stderr(whole.removeprefix(self._shown))

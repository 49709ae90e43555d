"""Who does what is asked: the table from each model of ``protocol`` to its function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sandbox.serve import checking, oversee, runs
from sandbox.serve.conversation import Conversation

HANDLERS: Final[Mapping[str, Callable[[Conversation, Any], None]]] = {
    "ps": oversee.ps,
    "top": oversee.top,
    "operate": oversee.operate,
    "logs": oversee.logs,
    "wait": oversee.wait,
    "run": runs.run,
    "check_package": checking.check_package,
}

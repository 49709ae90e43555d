"""Route each request model of ``protocol`` to its function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sandbox.serve.api import check_package, manage, run, workspaces
from sandbox.serve.api.session import Session

HANDLERS: Final[Mapping[str, Callable[[Session, Any], None]]] = {
    "ps": manage.ps,
    "top": manage.top,
    "operate": manage.operate,
    "logs": manage.logs,
    "wait": manage.wait,
    "run": run.run,
    "session": run.session,
    "attach": manage.attach,
    "check_package": check_package.check_package,
    "workspace": workspaces.answer,
    "approvals": manage.approvals,
}

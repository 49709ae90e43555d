"""One tree of errors: one class per cause, fields instead of prose, sorted by who must act.

A message is one lower-case line without a full stop, user input in backticks. Advice goes to ``hint``,
the place (``agent.toml:31``) to ``where``. Exit statuses are decided in ``covenant.cli`` alone.
``TABLE`` is the closed set of codes; ``covenant help CODE`` prints the class's docstring.
"""

from __future__ import annotations

# One class stands in one place: each module is re-exported whole.
from policy.errors.author import *  # noqa: F403
from policy.errors.base import *  # noqa: F403
from policy.errors.daemon import *  # noqa: F403
from policy.errors.exhausted import *  # noqa: F403
from policy.errors.layers import *  # noqa: F403
from policy.errors.machine import *  # noqa: F403
from policy.errors.operator import *  # noqa: F403
from policy.errors.rules import *  # noqa: F403
from policy.errors.runs import *  # noqa: F403
from policy.errors.service import *  # noqa: F403
from policy.errors.signatures import *  # noqa: F403
from policy.errors.workspaces import *  # noqa: F403

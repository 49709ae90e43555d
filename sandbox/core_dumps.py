"""Forbids core dumps of the calling process and of what it starts (policy.core_dumps says why the limit is 1).

The limit is 0 where a hard limit of 0 cannot be raised, which takes CAP_SYS_RESOURCE. Then core files are stopped, and
a handler of core_pattern is not.
"""

from __future__ import annotations

import contextlib
import resource

from policy import core_dumps


def forbid() -> None:
    """Set both limits, for good."""
    wanted = limit()
    resource.setrlimit(resource.RLIMIT_CORE, (wanted, wanted))


def lower() -> None:
    """Set the soft limit, which decides, and which what is started inherits. The hard limit stays."""
    wanted = limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_CORE, (wanted, hard))


def limit() -> int:
    """The limit that this process and its children can have; a hard limit of 0 is raised where that is possible."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (core_dumps.LIMIT, core_dumps.LIMIT))
    return 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else core_dumps.LIMIT

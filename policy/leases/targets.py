"""Targets of leases for calls: one call by the digest of its arguments, or every call that the policy asks about.

A call is one of a tool, or a request to which the gate adds a secret.
"""

from __future__ import annotations

import re
from typing import Final

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
# The kinds of leases whose targets may be one call.
CALLS: Final = ("tool", "inject")
_MARK: Final = " sha256:"
_REQUEST: Final = re.compile(r"([A-Z-]{1,32}) https://([a-z0-9.-]+)(/[!-~]*)")
# Characters of the arguments that an operator is shown. The views of all open requests of a run fit into one answer.
SHOWN_CHARACTERS: Final = 1024


def call(uri: str, digest: str) -> str:
    """The target of one call: its tool, and the SHA-256 of its arguments (policy.rules.tool_calls.encoded)."""
    return f"{uri}{_MARK}{digest}"


def tool(target: str) -> str | None:
    """The tool, or the method and URL, of the target of one call. None for another target."""
    uri, mark, digest = target.partition(_MARK)
    return uri if mark and uri and _DIGEST.fullmatch(digest) else None


def request(method: str, host: str, path: str) -> str:
    """The target of every request by a method to a path. Empty where no request is so."""
    made = f"{method} https://{host}{path}"
    return made if _REQUEST.fullmatch(made) else ""


def requested(target: str) -> tuple[str, str, str] | None:
    """The method, host and path of the target of a request with a secret. None for another target."""
    found = _REQUEST.fullmatch(tool(target) or target)
    return None if found is None else (found[1], found[2], found[3])


def covering(kind: str, target: str) -> tuple[str, ...]:
    """The targets of the leases that cover a use of ``target``: itself and, for a call, its tool or request."""
    uri = tool(target) if kind in CALLS else None
    return (target,) if uri is None else (target, uri)


def view(arguments: str, size: int, *, more: bool = False) -> str:
    """The view of arguments, which are JSON in ASCII, for an operator: bounded, and it says so where it is cut.

    ``more``: they were cut already. A character that a screen would escape is escaped as JSON here, before the cut, so
    that the view does not grow again.
    """
    plain = arguments.replace("`", "\\u0060").replace("\x7f", "\\u007f")
    if len(plain) <= SHOWN_CHARACTERS and not more:
        return plain
    end = f"... {size} bytes in all"
    return plain[: SHOWN_CHARACTERS - len(end)] + end

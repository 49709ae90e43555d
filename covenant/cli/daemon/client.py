"""Connect the daemon's verbs to it: as the operator, or as the peer of COVENANT_TOKEN_FILE.

Also the options that these verbs share: ``--json``, limits, cut-offs, and examples below ``--help``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from covenant.cli import common, times
from policy import errors

if TYPE_CHECKING:
    from covenant.wire.client import Client

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_FILE = "COVENANT_TOKEN_FILE"  # noqa: S105 - the name of a variable
MOST = 2**32 - 1
MILLISECONDS = click.IntRange(0, 2**64 - 1)

examples = common.examples
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def limit(default: int, *, least: int = 1) -> Callable[[F], F]:
    """``-n``/``--limit``."""
    return click.option(
        "-n", "--limit", type=click.IntRange(least, MOST), default=default, show_default=True, help="At most so many."
    )


def cut_off(what: str) -> Callable[[F], F]:
    """``--before-ms`` or ``--older-than-ms``, as ``before_ms`` and ``older_than_ms`` for ``moment``."""

    def options(command: F) -> F:
        older = click.option("--older-than-ms", type=MILLISECONDS, help=f"{what} older than so many milliseconds.")
        before = click.option(
            "--before-ms", type=MILLISECONDS, help=f"{what} from before this Unix time, in milliseconds."
        )
        return before(older(command))

    return options


def moment(before_ms: int | None, older_than_ms: int | None, *, option: str = "") -> int:
    """Return the only cut-off that was given.

    Raises:
        errors.UsageError: none was given, or both.
    """
    found = either(before_ms, older_than_ms, option=option)
    if found is None:
        raise errors.UsageError("a cut-off is needed", hint=f"give --{option}before-ms or --{option}older-than-ms")
    return found


def either(before_ms: int | None, older_than_ms: int | None, *, option: str = "") -> int | None:
    """Return the cut-off that was given, if any.

    Raises:
        errors.UsageError: both were given.
    """
    if before_ms is not None and older_than_ms is not None:
        raise errors.UsageError(f"--{option}before-ms and --{option}older-than-ms are two cut-offs", hint="give one")
    return max(0, times.now_ms() - older_than_ms) if older_than_ms is not None else before_ms


def document(text: str, *, option: str, example: str = '{"text": "hi"}') -> Any:
    """Parse the JSON of an option. ``example`` is shown as the fix.

    Raises:
        errors.UsageError: it is invalid.
    """
    try:
        return json.loads(text)
    except ValueError as e:
        raise errors.UsageError(f"{option} is no JSON: {e}", hint=f"such as {option} '{example}'") from None


@contextlib.contextmanager
def daemon(*, answer_seconds: float | None = None) -> Iterator[Client]:
    """Yield a client that is connected to the daemon. ``answer_seconds`` bounds the wait for each answer.

    Raises:
        errors.DaemonSilentError: no daemon answers.
        errors.AuthenticationError: the token is not accepted.
    """
    from covenant.wire import client

    with client.connected(common.home(), token=_token(), answer_seconds=answer_seconds) as one:
        yield one


def ask(kind: str, /, **fields: Any) -> dict[str, Any]:
    """Send one request and return its response.

    Raises:
        errors.CovenantError: the daemon refused, or none answers.
    """
    with daemon() as one:
        return one.ask(kind, **fields)


def envelope(kind: str, response: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the document of ``--json``: version 1's name for it, and the daemon's response."""
    return {"kind": kind, **more, **{name: value for name, value in response.items() if name != "kind"}}


def _token() -> str | None:
    """Return the token of COVENANT_TOKEN_FILE; None if it is not set.

    Raises:
        errors.KeyFileError: the file is missing, empty, or can be read by others.
    """
    path = os.environ.get(TOKEN_FILE)
    return common.read_passphrase(path).decode("ascii", "replace") if path else None

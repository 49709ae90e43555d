"""Calls ``covenant`` in this process, as an operator would, and reads its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from covenant.cli.main import cli
from policy import errors


def call(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    """Run one command, which may succeed or fail."""
    return CliRunner().invoke(cli, [str(a) for a in arguments], input=stdin)


def done(*arguments: str | Path, stdin: str | bytes | None = None) -> str:
    """One command that succeeds; its stdout."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def document(*arguments: str | Path) -> dict[str, Any]:
    """One command that succeeds, with ``--json``; its one document."""
    value = json.loads(done(*arguments, "--json"))
    assert isinstance(value, dict)
    return value


def refused(code: str, *arguments: str | Path, stdin: str | bytes | None = None) -> errors.CovenantError:
    """One command that is refused with this code."""
    result = call(*arguments, stdin=stdin)
    assert isinstance(result.exception, errors.CovenantError), (result.output, result.exception)
    assert result.exception.code == code, result.exception
    return result.exception

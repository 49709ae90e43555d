"""Messages and commands of set-up and undo: every change is printed before it is made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

# apt and dpkg on a busy machine: waiting for another apt is fine, waiting for ever is not.
COMMAND_DEADLINE_SECONDS = 1800


class SetupError(Exception):
    """Raised when this machine lacks something: the message names it, `mend` says how to get it, one line each."""

    def __init__(self, message: str, *mend: str) -> None:
        super().__init__(message)
        self.mend = mend


def change(what: str) -> None:
    """Announce a change of the machine or the clone, before it is made."""
    print(f"change: {what}", flush=True)


def ok(what: str) -> None:
    """Report something that is as it should be."""
    print(f"  ok: {what}", flush=True)


def note(what: str) -> None:
    print(f"  note: {what}", flush=True)


def report(error: SetupError) -> None:
    """Print what is missing and the mend on stderr."""
    print(f"\nmissing: {error}", file=sys.stderr)
    for line in error.mend:
        print(f"   fix: {line}", file=sys.stderr)
    sys.stderr.flush()


def asked(usage: str | None, words: Sequence[str]) -> int | None:
    """Answer for a script that takes no words. Returns the status of its end, or None where it may begin.

    ``--help`` prints ``usage``; every other word is refused: it is not meant for the whole script.
    """
    if not words:
        return None
    is_help = list(words) in (["-h"], ["--help"])
    print((usage or "").strip(), file=sys.stdout if is_help else sys.stderr)
    if not is_help:
        print(f"\nrefused: `{' '.join(words)}`: this script takes no words", file=sys.stderr)
    return 0 if is_help else 2


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> str:
    """Run a command to its end and return its stdout; its output is shown only when it fails.

    Raises:
        SetupError: it could not be started, did not end in time, or its status was not 0.
    """
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=COMMAND_DEADLINE_SECONDS,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SetupError(f"`{' '.join(command)}` did not run: {e}") from e
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise SetupError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{tail}")
    return done.stdout


def quiet(command: Sequence[str]) -> tuple[int, str]:
    """Ask a question of the machine: exit status and stdout; absent is 127, too slow 124 (as in a shell)."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=900
        )
    except FileNotFoundError:
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout

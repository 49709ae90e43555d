"""``covenant stdio``, and ``covenant run`` of a package with the contract `stdio` or `terminal`: the caller's streams
or its terminal to an agent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from covenant.cli import common
from covenant.cli.run import streams, supervisor_client
from covenant.cli.run.how import PLAIN, How
from policy import contract, errors
from policy.package import MANIFEST_BYTES

if TYPE_CHECKING:
    from sandbox.run_result import RunResult

# A refusal of ours, which no program's own status should look like (env(1), timeout(1)).
EXIT_REFUSED: Final = 125

# Runs a package in this process, given the session's connection.
Here = Callable[["streams.SessionPipes"], "RunResult"]


# The size of a terminal without a caller, in columns and rows.
_SIZE: Final = (80, 24)


def stream_of(path: Path) -> str | None:
    """Return the stream that the package says its agent speaks, None for an agent with an intent.

    The run itself decides by the signed manifest.
    """
    try:
        with open(path / "agent.toml", "rb") as file:
            return stream_in(file.read(MANIFEST_BYTES))
    except OSError:
        return None  # the run says what is wrong with it


def stream_in(manifest: bytes) -> str | None:
    """Return the stream that a manifest names, as ``stream_of`` does."""
    try:
        process = tomllib.loads(manifest.decode()).get("process")
    except ValueError:
        return None  # the run says what is wrong with it
    named = process.get("contract") if isinstance(process, dict) else None
    return named if named in contract.STREAMS else None


def name_lines(error: errors.CovenantError, manifest: bytes) -> None:
    """Have an error, and those found with it, show the line of a manifest that no file has, instead of its number."""
    lines = manifest.decode("utf-8", "replace").splitlines()
    for one in errors.each(error):
        file, _, place = one.where.partition(":")
        number = place.partition(":")[0]
        if file == "agent.toml" and number.isdecimal() and 0 < int(number) <= len(lines):
            one.where = f"in the session's manifest: {lines[int(number) - 1]}"


def status_of(
    stream: str | None,
    package: Path | None,
    timeout_ms: int | None,
    here: Here,
    *,
    how: How = PLAIN,
    manifest: bytes = b"",
) -> int:
    """Run a session with this process's streams, and return the agent's exit status, or 125 for a refusal.

    ``stream`` is the one that the agent speaks. ``package`` is given to a supervisor if one listens; without it the
    session runs here. ``manifest`` is that of a package that is in memory alone.
    """
    from covenant.cli.run import waiting

    has_terminal = stream == "terminal" and streams.has_terminal()
    if how.record is not None and not has_terminal:
        raise errors.UsageError(
            "--record is for a session with a terminal",
            hint='leave --record out, or run a package with contract = "terminal" in a terminal',
        )
    with_terminal = not how.quiet and has_terminal
    if how.keep and (not with_terminal or how.record is not None):
        raise errors.UsageError(
            "--keep is for a session with a terminal, without --record", hint="leave --keep out, or use --detach"
        )
    if how.workspace is not None and not how.quiet:
        supervisor_client.say_apart(how.workspace)
    run_ids: list[str] = []
    try:
        with (
            streams.terminal(raw_output=how.raw, record=how.record, keep=how.keep)
            if with_terminal
            else streams.connected(raw_output=how.raw)
        ) as connection:
            answer = waiting.until_free(
                how.wait,
                lambda: _answer(package, timeout_ms, here, connection, run_ids, how=how),
                quiet=how.quiet,
                again=connection.pause,
            )
    except errors.CovenantError as e:
        name_lines(e, manifest)
        common.report(e)
        return EXIT_REFUSED
    if answer is None:
        return say_detached(run_ids[0])
    if answer.denials and not how.quiet:
        from covenant.cli.policy import denials

        denials.remark(answer.denials, answer.run_id)
    status = _status(answer)
    if how.workspace is not None:
        _end_workspace(answer.run_id, ask=with_terminal and not how.keep_workspace, here=package is None)
    return status


def _end_workspace(run_id: str, *, ask: bool, here: bool) -> None:
    """Say what became of the workspace. An error of it does not change the agent's exit status."""
    from covenant.cli.operator import workspace_review

    try:
        workspace_review.end_session(run_id, ask=ask, here=here)
    except errors.CovenantError as e:
        common.report(e)


def _status(answer: RunResult) -> int:
    if answer.error is None or (isinstance(answer.error, errors.AgentFailedError) and answer.exit_status is not None):
        return answer.exit_status or common.EXIT_DONE
    common.report(answer.error)
    return EXIT_REFUSED


def start_detached(path: Path, timeout_ms: int | None) -> int:
    """Start a session with a terminal and no caller. Returns when its agent runs."""
    from sandbox.run_io import CallerStreams
    from sandbox.serve.api import client

    if stream_of(path) != "terminal":
        raise errors.UsageError(
            "--detach is for a session with a terminal",
            hint='leave --detach out, or set contract = "terminal" in [process]',
        )
    columns, rows = os.get_terminal_size(1) if os.isatty(1) else _SIZE
    with supervisor_client.supervisor() as sock:
        if sock is None:
            raise _no_supervisor()
        directory = supervisor_client.open_package(path)

        def said(state: Mapping[str, Any]) -> None:
            supervisor_client.say_whose(state)
            if state.get("state") == "started":
                raise _StartedError(str(state.get("run_id")))

        try:
            caller = CallerStreams(-1, -1, size=(rows, columns), stays=True)
            answer = client.session(sock, directory, caller, timeout_ms=timeout_ms, said=said)
        except _StartedError as e:
            common.say(e.run_id)
            return common.EXIT_DONE
        except errors.CovenantError as e:
            common.report(e)
            return EXIT_REFUSED
        finally:
            os.close(directory)
    # It ended before it was seen to start.
    return _status(answer)


class _StartedError(Exception):
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


def say_detached(run_id: str) -> int:
    """Say how to return to a session. Returns the exit status."""
    common.say(f"detached: the session goes on; covenant attach {run_id[:8]}", err=True)
    return common.EXIT_DONE


def _no_supervisor() -> errors.UsageError:
    return errors.UsageError(
        "no supervisor listens, and without one nothing holds a detached session",
        hint=f"{supervisor_client.start()} (docs/supervisor.md), or leave the option out",
    )


def _answer(
    package: Path | None,
    timeout_ms: int | None,
    here: Here,
    connection: streams.SessionPipes,
    run_ids: list[str],
    *,
    how: How,
) -> RunResult | None:
    """Return the answer; None if the user has detached. ``run_ids`` gets the id of the run."""
    if package is not None:
        with supervisor_client.supervisor() as sock:
            if sock is not None:
                return _supervised(sock, package, timeout_ms, connection, run_ids, how)
    if how.keep:
        raise _no_supervisor()
    return here(connection)


def _supervised(
    sock: socket.socket,
    path: Path,
    timeout_ms: int | None,
    connection: streams.SessionPipes,
    run_ids: list[str],
    how: How,
) -> RunResult | None:
    from sandbox.run_io import DETACH
    from sandbox.serve.api import client

    def leave() -> None:
        with contextlib.suppress(OSError):  # the session has just ended
            sock.send(DETACH)
            sock.shutdown(socket.SHUT_RD)

    def said(state: Mapping[str, Any]) -> None:
        connection.release()
        if not how.quiet:
            supervisor_client.say_whose(state)
        connection.begin()
        if state.get("state") == "started":
            run_ids.append(str(state.get("run_id")))
            connection.detaches(how.keys if how.record is None else b"", leave)

    directory = supervisor_client.open_package(path)
    try:
        with supervisor_client.given_workspace(how) as workspace:
            return client.session(
                sock, directory, connection.streams, timeout_ms=timeout_ms, said=said, workspace=workspace
            )
    except errors.ServiceError:
        if not connection.detached:
            raise
        return None
    finally:
        os.close(directory)

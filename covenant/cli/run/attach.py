"""``covenant attach``: connect this terminal to a detached session."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import click

from covenant.cli import common
from covenant.cli.run import detach_keys as keys_of
from covenant.cli.run import session, streams, supervisor_client
from policy import errors


@click.command(epilog=common.examples("covenant attach 6f1f64c0", "covenant attach 6f1f64c0 --detach-keys ctrl-a,d"))
@click.argument("run", metavar="RUN")
@click.option("--raw", is_flag=True, help="Pass on clipboard and title-report sequences too.")
@keys_of.OPTION
def attach(run: str, raw: bool, detach_keys: str) -> int:
    """Connect this terminal to the detached session RUN, and end as it does.

    It shows the end of what the session has shown, and has the session draw its screen anew.
    """
    keys = keys_of.parse(detach_keys)
    if not streams.has_terminal():
        raise errors.UsageError("a session is attached to a terminal", hint="run it in a terminal; see covenant logs")
    run_ids: list[str] = []

    def attached(state: Mapping[str, Any]) -> None:
        run_ids.append(str(state.get("run_id")))
        ways = f"{keys_of.shown(keys)} detaches" if keys else "it is detached when this command ends"
        common.say(f"attached to {run_ids[0]}; {ways}", err=True)

    try:
        with streams.terminal(raw_output=raw, keep=True) as connection:
            record = _attached(run, connection, keys, attached)
    except errors.CovenantError as e:
        common.report(e)
        return session.EXIT_REFUSED
    return session.say_detached(run_ids[0]) if record is None else _status(record)


def _attached(
    run: str, connection: streams.SessionPipes, keys: bytes, attached: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any] | None:
    """Return the record of the run when it has ended; None if the user has detached."""
    from sandbox.serve.api import client

    with supervisor_client.supervisor() as sock:
        if sock is None:
            return _here(run, connection, keys, attached)

        def leave() -> None:
            with contextlib.suppress(OSError):  # the session has just ended
                sock.shutdown(socket.SHUT_RDWR)

        def said(state: Mapping[str, Any]) -> None:
            attached(state)
            connection.detaches(keys, leave)
            connection.release()
            connection.begin()

        try:
            return client.attach(sock, run, connection.streams, said=said)
        except errors.ServiceError:
            if not connection.detached:
                raise
            return None


def _here(
    run: str, connection: streams.SessionPipes, keys: bytes, attached: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any] | None:
    """Ask the run's shim from this process: a session may have outlived its supervisor."""
    if os.geteuid() != 0:
        raise errors.PrivilegeError("runs are root's to look at where no supervisor listens", hint="run it with sudo")
    from sandbox.control import manager

    state, root, given = common.state(), manager.Requester("operator@local", root=True), connection.streams
    assert given.size is not None
    run_id = manager.attach(state, root, run, (given.stdin, given.stdout, given.resizes), given.size)
    attached({"run_id": run_id})
    connection.detaches(keys, lambda: None)
    connection.release()
    connection.begin()
    record = manager.ended(state, root, run_id, left=lambda: connection.detached)
    return None if record is None else record.model_dump()


def _status(record: Mapping[str, Any]) -> int:
    if record["status"] == "ok":
        return int(record["exit_status"] or common.EXIT_DONE)
    if record["code"] == errors.AgentFailedError.code and record["exit_status"] is not None:
        return int(record["exit_status"])
    common.report(errors.restored({"code": record["code"], "message": record["message"] or "the run failed"}))
    return session.EXIT_REFUSED

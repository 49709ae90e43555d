"""``covenant ps|suspend|resume|kill|logs|wait``: who lives now, what can be asked of a run, and what became of it.

The supervisor answers where one listens; as root the same code answers in this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, terminal, times
from policy import errors

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from sandbox.control.manager import Operation, Requester, Stream

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_TREE = click.option("--tree", is_flag=True, help="The run and everything below it.")
_REASON = click.option("--reason", default="", metavar="TEXT", help="Why; it stands in the log.")
_RUN = click.argument("run", metavar="RUN")
_RUN_OR_PACKAGE = click.argument("run", metavar="RUN|PACKAGE")

_WATCH_SECONDS, _FOLLOW_SECONDS = 1.0, 0.3
# So much of a run id is shown; more where two begin alike.
_ID = 8
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@click.command(epilog=common.examples("covenant ps", "covenant ps --tree", "covenant ps --watch"))
@click.option("--tree", is_flag=True, help="Indent each run below the one that started it.")
@click.option("--watch", is_flag=True, help="Show it again each second, on a terminal.")
@_JSON
def ps(tree: bool, watch: bool, as_json: bool) -> None:
    """List the runs that live now: whose agents they are, their states and their ages; oldest first."""
    if watch and (as_json or not sys.stdout.isatty()):
        raise errors.UsageError("--watch is for a terminal", hint="ask again with `covenant ps --json`")
    if as_json:
        common.emit({"kind": "runs", "runs": listed()})
        return
    if not watch:
        common.say("\n".join(_table(listed(), tree=tree)))
        return
    # Whenever it comes: asking takes as long as waiting does.
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            lines = _table(listed(), tree=tree)
            room = max(2, shutil.get_terminal_size().lines - 1)
            common.say("\x1b[H\x1b[J" + "\n".join(lines[:room]))
            time.sleep(_WATCH_SECONDS)


@click.command(
    epilog=common.examples("covenant suspend 6f1f64c0", 'covenant suspend 6f1f64c0 --tree --reason "the disk is full"')
)
@_RUN
@_TREE
@_REASON
@_JSON
def suspend(run: str, tree: bool, reason: str, as_json: bool) -> None:
    """Stop RUN where it is, its sandbox included; its clocks run on."""
    _operate("suspend", run, tree=tree, reason=reason, as_json=as_json)


@click.command(epilog=common.examples("covenant resume 6f1f64c0"))
@_RUN
@_TREE
@_REASON
@_JSON
def resume(run: str, tree: bool, reason: str, as_json: bool) -> None:
    """Let RUN go on where it was suspended."""
    _operate("resume", run, tree=tree, reason=reason, as_json=as_json)


@click.command(epilog=common.examples('covenant kill 6f1f64c0 --reason "not needed"', "covenant kill 6f1f64c0 --tree"))
@_RUN
@_TREE
@_REASON
@_JSON
def kill(run: str, tree: bool, reason: str, as_json: bool) -> None:
    """End RUN now; it is gone when this returns."""
    _operate("kill", run, tree=tree, reason=reason, as_json=as_json)


@click.command(
    epilog=common.examples(
        "covenant logs 6f1f64c0", "covenant logs 6f1f64c0 --follow", "covenant logs 6f1f64c0 --stdout"
    )
)
@_RUN_OR_PACKAGE
@click.option("--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--stdout", is_flag=True, help="Show the end of stdout instead, of a run that failed.")
@_JSON
def logs(run: str, follow: bool, stdout: bool, as_json: bool) -> None:
    """Show what RUN's agent wrote to stderr: of a live run, or the end of it of one that ended.

    PACKAGE is the newest live run of that package, else the newest that ended.
    """
    stream: Stream = "stdout" if stdout else "stderr"
    run = of_package(run, ended=True)
    if follow and as_json:
        raise errors.UsageError("--follow prints no document", hint="leave --json out")
    if as_json:
        common.emit({"kind": "logs", **_whole(run, stream)})
        return
    ended_line, cut = True, ""
    for piece in pieces(run, stream, follow=follow):
        if piece["begins"] > piece["asked"]:
            common.say(f"[{piece['begins'] - piece['asked']} bytes dropped]", err=True)
        text, cut = line_ends(cut + piece["text"])
        if text:
            common.write(common.visible(text, newlines=True))
            ended_line = text.endswith("\n")
    if not ended_line:
        common.say()


@click.command(epilog=common.examples("covenant wait 6f1f64c0", "covenant wait 6f1f64c0 --json"))
@_RUN_OR_PACKAGE
@_JSON
def wait(run: str, as_json: bool) -> int:
    """Wait until RUN has ended, and end as it did: exit status 0 when it was answered, 1 with its error when not.

    PACKAGE is the newest live run of that package.
    """
    document = _asked("wait", run=of_package(run))["record"]
    if document["status"] != "ok" and not as_json:
        raise errors.restored({"code": document["code"], "message": document["message"] or "the run failed"})
    if as_json:
        common.emit(document)
    else:
        common.say(common.visible(f"run {document['run_id']} of {document['agent_id']} was answered"))
    return common.EXIT_DONE if document["status"] == "ok" else common.EXIT_FAILED


def _operate(operation: Operation, run: str, *, tree: bool, reason: str, as_json: bool) -> None:
    done = _asked("operate", operation=operation, run=run, tree=tree, reason=reason)["runs"]
    if as_json:
        common.emit({"kind": operation, "runs": done})
        return
    for one in done:
        common.say(f"{_DONE[operation]} {one}")
    if not done:
        common.say("nothing was to be done")


_DONE = {"suspend": "suspended", "resume": "resumed", "kill": "ended"}


def of_package(run: str, *, ended: bool = False) -> str:
    """Return the id of the newest live run of a package, where ``run`` is a package's directory; else ``run`` itself.

    An instance of standby that waits for its intent is no run yet. With ``ended``, it is the newest run that has a
    record where none lives.

    Raises:
        errors.NoRunError: no run of the package lives, or with ``ended``, none has a record either.
        errors.CovenantError: its manifest cannot be read.
    """
    from pathlib import Path

    place = Path(run)
    if not (place / "agent.toml").is_file():
        return run
    from policy.manifest import parse

    agent_id = parse.parse((place / "agent.toml").read_bytes()).agent.id
    live = [one for one in listed() if one["agent_id"] == agent_id and not _waits(one)]
    if not live and ended:
        return newest_ended(agent_id)
    if not live:
        raise errors.NoRunError(f"no run of `{agent_id}` lives", hint="covenant ps lists those that do; or give its id")
    return str(max(live, key=lambda one: one["started_ms"])["run_id"])


def _waits(one: Mapping[str, Any]) -> bool:
    """Whether a listed run is an instance of standby without an intent: then its issuer is the supervisor's own."""
    from policy import standby

    return bool(one["state"] == "Isolated" and one["issuer"] == standby.ISSUER)


# --- who answers ------------------------------------------------------------------------------------------------


def _asked(kind: str, **fields: Any) -> dict[str, Any]:
    """The answer of the supervisor, or of this process where there is none.

    Raises:
        errors.PrivilegeError: there is none, and this is not root.
    """
    from covenant.cli.run import supervisor_client

    with supervisor_client.supervisor() as sock:
        if sock is not None:
            return _of_supervisor(sock, kind, fields)
    if os.geteuid() != 0:
        raise errors.PrivilegeError("runs are root's to look at where no supervisor listens", hint="run it with sudo")
    from sandbox.control import manager

    return _HERE[kind](common.state(), manager.Requester("operator@local", root=True), **fields)


def _of_supervisor(sock: socket.socket, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    from sandbox.serve.api import client

    return client.ask(sock, kind, **fields)


def _here_ps(state: Path, requester: Requester) -> dict[str, Any]:
    from sandbox.control import manager

    return {"runs": manager.listed(state, requester)}


def _here_operate(
    state: Path, requester: Requester, *, operation: Operation, run: str, tree: bool, reason: str
) -> dict[str, Any]:
    from sandbox.control import manager

    return {"runs": manager.operate(state, requester, operation, run, reason=reason, tree=tree)}


def _here_logs(
    state: Path,
    requester: Requester,
    *,
    run: str = "",
    agent: str = "",
    offset: int = 0,
    stream: Stream = "stderr",
) -> dict[str, Any]:
    from sandbox.control import manager

    run = run or manager.newest(state, requester, agent)
    return manager.logs(state, requester, run, offset, stream=stream)


def _here_wait(state: Path, requester: Requester, *, run: str) -> dict[str, Any]:
    from sandbox.control import manager

    record = manager.ended(state, requester, run)
    assert record is not None
    return {"record": record.model_dump()}


_HERE: dict[str, Callable[..., dict[str, Any]]] = {
    "ps": _here_ps,
    "operate": _here_operate,
    "logs": _here_logs,
    "wait": _here_wait,
}


# --- logs -------------------------------------------------------------------------------------------------------


def line_ends(text: str) -> tuple[str, str]:
    r"""Return text of a terminal, which ends its lines with ``\r\n``, with plain line ends, and the rest of it.

    The rest is a ``\r`` at the end, which belongs to what comes next. An agent chose the text: the search begins once
    in a run of ``\r``.
    """
    plain = re.sub(r"(?<!\r)\r+\n", "\n", text)
    return plain.removesuffix("\r"), "\r" if plain.endswith("\r") else ""


def pieces(
    run: str, stream: Stream, *, follow: bool, ask: Callable[..., dict[str, Any]] = _asked
) -> Iterator[dict[str, Any]]:
    """A run's stderr, or stdout, piece by piece; ``asked`` is from where it was asked for.

    Without ``follow`` it is what was said before the first question: a run may write faster than it is read.
    """
    offset, ends = 0, None
    while True:
        piece = ask("logs", run=run, offset=offset, stream=stream)
        yield {**piece, "asked": offset}
        # The rest of it is asked for by its whole id: another may begin alike by then.
        run, got = piece["run_id"], piece["next"] > offset
        # A keeper of an older release does not say where its text ends.
        offset, ends = piece["next"], piece.get("ends") if ends is None else ends
        if not follow and ends is not None and offset >= ends:
            return
        if not got and not (follow and piece["live"]):
            return
        if not got:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_FOLLOW_SECONDS)
                continue
            return


def _whole(run: str, stream: Stream) -> dict[str, Any]:
    found = list(pieces(run, stream, follow=False))
    dropped = sum(piece["begins"] - piece["asked"] for piece in found)
    text = "".join(piece["text"] for piece in found)
    return {"run_id": found[0]["run_id"], "live": found[-1]["live"], "dropped_bytes": dropped, "text": text}


# --- the table --------------------------------------------------------------------------------------------------


def listed() -> list[dict[str, Any]]:
    """Return the live runs, as the supervisor or this process lists them."""
    runs: list[dict[str, Any]] = _asked("ps")["runs"]
    return runs


def newest_ended(agent_id: str) -> str:
    """Return the id of the newest run of an agent that has ended.

    Raises:
        errors.NoRunError: no such run has a record.
    """
    return str(_asked("logs", agent=agent_id)["run_id"])


def _table(runs: list[dict[str, Any]], *, tree: bool) -> list[str]:
    """Return the runs as lines that fit the terminal: the widest columns are cut."""
    if not runs:
        return ["no agent is running"]
    short = _short([run["run_id"] for run in runs])
    rows = [("RUN", "STATE", "AGE", "PARENT", "BY", "AGENT")]
    now = time.time()
    for run in runs:
        indent = "  " * run["depth"] if tree else ""
        age = times.age(1000 * now - run["started_ms"])
        parent = run["parent"] or ""
        # A child is its parent's, which is named by its run.
        who = _UUID.sub(lambda found: found[0][:short], common.visible(run["issuer"]))
        rows.append(
            (
                run["run_id"][:short],
                run["state"],
                age,
                parent[:short] or "-",
                who,
                indent + run["agent_id"],
            )
        )
    return [
        *terminal.table(rows[0], rows[1:], width=terminal.width()),
        *_published(runs, short),
        *_services(runs, short),
    ]


def _services(runs: list[dict[str, Any]], short: int) -> Iterator[str]:
    """A line for each run with a service gate. A supervisor of an earlier version names none."""
    for run in runs:
        if names := run.get("services", ()):
            yield f"{run['run_id'][:short]} has a service gate for {', '.join(names)}"


def _published(runs: list[dict[str, Any]], short: int) -> Iterator[str]:
    """A line for each published port. A supervisor of an earlier version names none."""
    for run in runs:
        for one in run.get("published", ()):
            yield f"{run['run_id'][:short]} publishes port {one['port']} at {common.visible(one['to'])}"


def _short(ids: list[str]) -> int:
    """How much of each id tells it from all others."""
    return next(n for n in range(_ID, 37) if len({one[:n] for one in ids}) == len(ids))

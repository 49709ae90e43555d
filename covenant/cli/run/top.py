"""``covenant top`` and ``covenant metrics``: the usage of the live runs, and the counters of the log.

The supervisor answers if one listens; as root the same code runs in this process.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, terminal
from policy import errors

if TYPE_CHECKING:
    from sandbox.control.metrics import Tally

_ID = 8
_CLEAR = "\x1b[H\x1b[J"
_HEADS = ("RUN", "STATE", "CPU%", "CPU", "MEMORY", "OF", "TASKS", "IN", "OUT", "DENIED", "AGENT")


@click.command(epilog=common.examples("covenant top", "covenant top --once", "covenant top --json"))
@click.option("--once", is_flag=True, help="Show it once.")
@click.option("--seconds", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="How often.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, once.")
def top(once: bool, seconds: float, as_json: bool) -> None:
    """Show the live runs as a tree, with what each uses: processor, memory, network, and what was refused to it.

    Off a terminal it shows it once. CPU% is of one core, since the last look.
    """
    look = looker()
    if as_json:
        common.emit({"kind": "top", "runs": look()})
        return
    if once or not sys.stdout.isatty():
        common.say("\n".join([*table(look(), {}, 0.0), *not_ready()]))
        return
    before: dict[str, int] = {}
    then = time.monotonic()
    try:
        while True:
            runs, now = look(), time.monotonic()
            lines = [*table(runs, before, now - then), *not_ready()]
            before, then = {one["run_id"]: one["cpu_ms"] or 0 for one in runs}, now
            size = shutil.get_terminal_size()
            common.say(_CLEAR + "\n".join(line[: size.columns] for line in lines[: max(2, size.lines - 1)]))
            time.sleep(seconds)
    except KeyboardInterrupt:
        return


@click.command(epilog=common.examples("covenant metrics"))
def metrics() -> None:
    """Print every number once, as Prometheus reads it. As root.

    By `metrics` of config.toml a supervisor serves them.
    """
    state = _as_root()
    from sandbox.control import metrics as numbers

    counted = numbers.tally(state, whole=True)
    for _ in counted.read():
        pass
    times = numbers.times(state, int(time.time() * 1000))
    common.write(numbers.text(numbers.live(state, counted), counted, times))


def looker() -> Callable[[], list[dict[str, Any]]]:
    """Return a function that lists the runs: from the supervisor, or by reading the state in this process."""
    from covenant.cli.run import supervisor_client

    with supervisor_client.supervisor() as sock:
        served = sock is not None
    if served:
        return _ask
    state = _as_root()
    from sandbox.control import metrics as numbers

    counted: Tally = numbers.tally(state, whole=False)

    def look() -> list[dict[str, Any]]:
        for _ in counted.read():
            pass
        return [seen.to_json() for seen in numbers.live(state, counted)]

    return look


def _ask() -> list[dict[str, Any]]:
    from covenant.cli.run import supervisor_client
    from sandbox.serve.api import client

    with supervisor_client.supervisor() as sock:
        if sock is None:
            raise errors.ServiceError("the supervisor that answered is gone", hint="ask again")
        runs: list[dict[str, Any]] = client.ask(sock, "top")["runs"]
    return runs


def _as_root() -> Path:
    if os.geteuid() != 0:
        raise errors.PrivilegeError("runs are root's to look at where no supervisor listens", hint="run it with sudo")
    return common.state()


def table(runs: list[dict[str, Any]], before: dict[str, int], seconds: float) -> list[str]:
    """Return the lines of the table of live runs."""
    rows = [_row(one, before, seconds) for one in runs]
    total = sum(one["memory_bytes"] or 0 for one in runs)
    lines = terminal.table(_HEADS, rows, width=terminal.width(), right=_HEADS[2:-1])
    return [f"{len(runs)} runs, {short_size(total)} in all", *lines]


def not_ready() -> list[str]:
    """Return, for root, why the supervisor keeps fewer instances ready than are asked for."""
    if os.geteuid() != 0:
        return []
    from sandbox.standby import backoff

    why = backoff.why_not_ready(common.state(), now_ms=int(time.time() * 1000))
    return [common.visible(f"standby: {line}") for line in why]


def _row(one: dict[str, Any], before: dict[str, int], seconds: float) -> tuple[str, ...]:
    run_id, cpu = one["run_id"], one["cpu_ms"]
    known = cpu is not None and run_id in before and seconds > 0
    return (
        run_id[:_ID],
        one["state"],
        f"{max(0, cpu - before[run_id]) / seconds / 10:.0f}" if known else "-",
        "-" if cpu is None else f"{cpu / 1000:.2f}s",
        short_size(one["memory_bytes"]),
        f"{one['memory_mb']}M",
        "-" if one["processes"] is None else str(one["processes"]),
        short_size(one["received_bytes"]),
        short_size(one["sent_bytes"]),
        str(one["denied"]),
        "  " * one["depth"] + one["agent_id"],
    )


def short_size(number: int | None) -> str:
    """Return a number of bytes in at most five characters."""
    if number is None:
        return "-"
    for unit in ("B", "K", "M", "G"):
        if number < 10_000:
            return f"{number}{unit}"
        number //= 1024
    return f"{number}T"

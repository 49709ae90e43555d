"""``covenant audit``: read the audit logs there are, and verify them, without root where they are readable.

    COVENANT_STATE/audit    the supervisor's log (COVENANT_STATE is $COVENANT_HOME/supervisor unless set)
    COVENANT_HOME/audit     the daemon's log

Each has its head and public key in ``audit-head`` beside it. Every answer names the logs that it read. What the daemon
acknowledged stands in ``audit-head/pending`` first: of one that was killed the files are read as its next start will
leave them; the supervisor's are so too, without what a writer that was killed left beyond the head. Verbs about
checkpoints and cuts are in ``covenant.cli.audit.proofs``, a witness in ``audit_witness``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import click

from covenant.cli import common, spinner, times
from covenant.cli.audit import archive, proofs, read_logs, show, witness
from covenant.cli.audit import stream as audit_stream
from covenant.cli.daemon import client
from policy import errors
from policy.audit_log import event_kinds
from sandbox import progress

_SHOWN_FAILURES = 40
# As many of the newest rows of each log are looked through for an id.
_MOST = 1_000_000
_OURS_LEFT_OUT = "rows of kinds that version 1 has not are left out; `--extended` shows them"
# So much of the id of a log's key is shown beside a row that was copied from it.
_ORIGIN_SHOWN = 12


@click.group()
def audit() -> None:
    """Read and verify the audit log."""


@audit.command(epilog=client.examples("covenant audit recent -n 20", "covenant audit recent --stream --json"))
@click.option("-n", "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Records.")
@click.option("--since-ms", type=click.IntRange(0), help="From this Unix time on, in milliseconds.")
@click.option("--since", metavar="TIME", help="Not older than this: 1h, 30m, 2d, or an ISO time.")
@click.option("--run", metavar="ID", help="Of this run; the beginning of its id is enough.")
@click.option("--intent", metavar="ID", help="Of this intent; the beginning of its id is enough.")
@click.option("--agent", metavar="ID", help="Of this agent.")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Of this kind, such as `denied`; repeatable.")
@click.option("--stream", is_flag=True, help="Your own, from the daemon, in parts; with --json, one document a line.")
@click.option("--extended", is_flag=True, help="With --json, every kind; without a filter only version 1's kinds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def recent(
    limit: int,
    since_ms: int | None,
    since: str | None,
    run: str | None,
    intent: str | None,
    agent: str | None,
    kinds: tuple[str, ...],
    stream: bool,
    extended: bool,
    as_json: bool,
) -> None:
    """Show the last records, oldest first. A record that is in both logs is shown once."""
    if since is not None:
        since_ms = max(since_ms or 0, times.since_ms(since, option="--since"))
    wanted = show.Filter(run=run, agent=agent, intent=intent, kinds=kinds)
    if stream and wanted != show.Filter():
        raise errors.UsageError("--stream takes no filter but --since", hint="leave --stream out")
    # A call that version 1's scripts make has the kinds and names that they decode. Version 1 had a daemon only.
    first = as_json and not extended and since is None and wanted == show.Filter()
    if stream:
        if first:
            common.say(_OURS_LEFT_OUT, err=True)
        audit_stream.follow(limit, since_ms, _line, as_json=as_json, extended=not first)
        return
    logs = read_logs.read_logs()
    first = first and any(log.name == "daemon" for log in logs)
    every = _MOST if wanted != show.Filter() else limit
    rows = show.once((row for log in logs for row in (_last_of_v1 if first else _last)(log, every)), read_logs.copied)
    originals = [_original(row) for row in rows]
    kinds_of = ((original or row).get("kind") for row, original in zip(rows, originals, strict=True))
    runs = show.of_runs(kind for kind in kinds_of if isinstance(kind, dict))
    rows = [
        row
        for row, original in zip(rows, originals, strict=True)
        if _admitted(row, original, wanted, runs) and (since_ms is None or show.moment(row) >= since_ms)
    ][-limit:]
    if not rows:
        _check_kinds(kinds)
    if as_json:
        found = {"kind": "audit_recent", "limit": limit, "since_ms": since_ms, "events": rows}
        listed = [{"origin": log.name, "path": str(log.path)} for log in logs]
        common.emit(found if first else {**found, "logs": listed})
        if first:
            _say_left_out(row for log in logs for row in _last(log, limit))
        return
    for log in logs:
        common.say(f"{log.name} log: {common.visible(str(log.path))}", err=True)
    for row in rows:
        common.say(_line(row))
    if not rows:
        common.say("no row matches", err=True)


@audit.command("show", epilog=client.examples("covenant audit show 6f1f64c0", "covenant audit show 6f1f64c0 --json"))
@click.argument("named", metavar="INTENT|RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show_(named: str, as_json: bool) -> None:
    """Show all that the logs have of one intent or run, and of the runs below it: a tree, each in time order.

    Denials, services, destinations, credentials, the workspace, the result and the cost are among it. Each run begins
    with a summary. The beginning of an id is enough.
    """
    logs = read_logs.read_logs()
    root, nodes = show.tree(
        show.once((row for log in logs for row in _last(log, _MOST)), read_logs.copied, unwrap=True), named
    )
    if as_json:
        common.emit({"kind": "audit_tree", "tree": show.document(root, nodes)})
        return
    for line in show.lines(root, nodes, _line):
        common.say(common.visible(line))


@audit.command(epilog=client.examples("covenant audit verify", "covenant audit verify --json"))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Check every record against the chain and the signed head. Exit status 3 when a log does not hold."""
    found = []
    with spinner.shown("reading the log", quiet=as_json), progress.step("reading the log") as further:
        for log in read_logs.read_logs():
            further(f"checking the {log.name} log, {len(log.events) >> 10} KiB")
            found.append((log, proofs.report(log)))
    # Version 1's clients look at one report: it must be a failed one if any failed.
    _, first = min(found, key=lambda item: item[1].valid)
    if as_json:
        logs = [
            {
                "origin": log.name,
                "path": str(log.path),
                "set_aside": list(log.set_aside),
                "report": report.to_json(),
            }
            for log, report in found
        ]
        failures = [one.text() for one in first.failures]
        common.emit({"kind": "audit_integrity", "report": {**first.to_json(), "failures": failures, "logs": logs}})
    else:
        for log, report in found:
            _print_report(log, report.to_json())
    if not first.valid:
        ctx.exit(common.EXIT_NO)


def started_policies() -> dict[str, str]:
    """The policy digest of each run that the supervisor's log has a start of.

    Raises:
        errors.LedgerError: there is no log, it cannot be read, or it does not hold.
    """
    from policy.audit_log import chain as audit_log_chain
    from policy.audit_log import verify as check

    for log in read_logs.read_logs():
        if log.name != "supervisor":
            continue
        key = None if log.public_key is None else audit_log_chain.read_public_key(log.public_key)
        if not check.verify(log.events, log.chain, log.head, key).valid:
            raise errors.LedgerError("the supervisor's log does not hold", hint="run `covenant audit verify`")
        kinds = [json.loads(line)["kind"] for line in log.events.split(b"\n") if b'"run_started"' in line]
        starts = [kind for kind in kinds if kind["type"] == "run_started" and kind["policy_digest"]]
        return {kind["run_id"]: kind["policy_digest"] for kind in starts}
    raise errors.LedgerError("the supervisor has no log here", hint="set COVENANT_HOME or COVENANT_STATE")


def _say_left_out(rows: Iterable[dict[str, Any]]) -> None:
    """Say which of the last records version 1's scripts do not get."""
    left = [row for row in rows if show.kind_of(row) not in event_kinds.VERSION_1]
    if left:
        common.say(_OURS_LEFT_OUT, err=True)
    if any("unreadable" in row for row in left):
        common.say("records that cannot be read are left out too; covenant audit verify says why", err=True)


def _check_kinds(kinds: Iterable[str]) -> None:
    """Refuse a kind that no row has and that no version writes: a typing error would look like a quiet night.

    Raises:
        errors.UsageError: there is no such kind.
    """
    from difflib import get_close_matches

    from policy.audit_log import events

    for kind in kinds:
        if kind not in events.KINDS:
            near = get_close_matches(kind, events.KINDS, n=1)
            meant = f"did you mean `{near[0]}`? or: " if near else ""
            hint = f"{meant}covenant audit recent shows kinds"
            raise errors.UsageError(f"--kind `{common.visible(kind[:40])}` is no kind of a row", hint=hint)


def _print_report(log: read_logs.LogBytes, report: dict[str, Any]) -> None:
    word = "holds" if report["valid"] else "DOES NOT HOLD"
    counts = f"{report['events']} events, {report['anchors']} chain entries, root {report['root_hash_hex']}"
    common.say(f"{log.name} log {common.visible(str(log.path))}: {word} ({counts})")
    failures = report["failures"]
    for failure in failures[:_SHOWN_FAILURES]:
        event = f" (event {common.visible(failure['event_id'])})" if failure["event_id"] else ""
        common.say(f"  {failure['kind']}: {common.visible(failure['message'])}{event}")
    if len(failures) > _SHOWN_FAILURES:
        common.say(f"  and {len(failures) - _SHOWN_FAILURES} more: see --json")
    for note in report["notes"]:
        common.say(f"  note: {common.visible(note)}")
    for name in log.set_aside:
        common.say(f"  note: unacknowledged bytes of a writer that died are in {common.visible(name)}")


def _last(log: read_logs.LogBytes, limit: int) -> Iterable[dict[str, Any]]:
    """The last records, each with its origin; a line that is no event is shown as such, not dropped."""
    lines = log.events.rsplit(b"\n", limit + 1)
    # What follows the last newline was never acknowledged; what precedes the limit is one long rest.
    complete = lines[:-1] if len(lines) <= limit + 1 else lines[1:-1]
    for line in complete[-limit:]:
        try:
            event = read_logs.NUMBERS_ONLY.decode(line.decode())
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            yield {**event, "origin": log.name}
        else:
            yield {"unreadable": line[:200].decode("utf-8", "backslashreplace"), "origin": log.name}


def _last_of_v1(log: read_logs.LogBytes, limit: int) -> list[dict[str, Any]]:
    """The last records of the kinds that version 1's clients can decode."""
    most = limit
    while True:
        rows = list(_last(log, most))
        known = [row for row in rows if show.kind_of(row) in event_kinds.VERSION_1]
        if len(known) >= limit or len(rows) < most:
            return known[-limit:]
        most *= 8


def _line(row: dict[str, Any]) -> str:
    if "unreadable" in row:
        return common.visible(f"{row['origin']} unreadable record: {row['unreadable']}")
    kind = row.get("kind")
    fields = dict(kind) if isinstance(kind, dict) else {"kind": kind}
    copied = read_logs.copied(fields)
    if copied is not None:
        where = f"supervisor:{str(fields.get('origin'))[:_ORIGIN_SHOWN]}#{fields.get('index')}"
        return _line({**copied, "origin": f"{row['origin']} (from {where})"})
    name = fields.pop("type", "?")
    shown = " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)
    return common.visible(f"{_time(row.get('timestamp_ms'))} {row['origin']} {name} {shown}")


def _admitted(
    row: dict[str, Any], original: dict[str, Any] | None, wanted: show.Filter, runs: Mapping[str, dict[str, Any]]
) -> bool:
    """Whether a row is to be shown: by its own fields, those of the row that it is a copy of, or those of its run."""
    kind = row.get("kind")
    if original is None or wanted.admits(row):
        return wanted.admits(show.with_run(row, runs))
    # The daemon knows the intent of a row that names none.
    about = {name: kind.get(name) for name in ("run_id", "intent_id")} if isinstance(kind, dict) else {}
    return wanted.admits(show.with_run({**row, "kind": {**about, **original["kind"]}}, runs))


def _original(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the row that a row is a copy of."""
    kind = row.get("kind")
    return read_logs.copied(kind) if isinstance(kind, dict) else None


def _value(value: Any) -> str:
    if isinstance(value, str) and value and not any(c.isspace() or c == '"' for c in value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _time(value: Any) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return str(value)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


proofs.register(audit)
audit.add_command(archive.archive)
audit.add_command(witness.cosign)
audit.add_command(audit_stream.provenance)

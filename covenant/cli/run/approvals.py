"""The command line about requests that wait for an operator: list them, grant one by a lease, deny one.

The supervisor answers where one listens; as root the same code answers in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli import common, terminal, times
from policy import errors

if TYPE_CHECKING:
    from covenant.keys.signers import Signer

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
# The longest life of a lease that names no time: for one use, and for the run.
_ONCE_MS: Final = 3_600_000
_RUN_MS: Final = 29 * 86_400_000
# The durations that a screen gives without a further question.
_UNASKED: Final = {
    "once": (_ONCE_MS, "for one use"),
    "run": (_RUN_MS, "for the run"),
    "until": (600_000, "for 10 minutes"),
}
_TARGET: Final = 60
# The exit status of a program that denies (the command's own word for no), and the pause between two looks.
_DENIES: Final = 3
_WATCH_SECONDS: Final = 0.25


@click.group()
def approvals() -> None:
    """See what agents wait for, grant it for a time, or deny it."""


@approvals.command("list", epilog=common.examples("covenant approvals list"))
@_JSON
def list_(as_json: bool) -> None:
    """List what waits for an operator, in runs here and at a Hermes API, and the leases that were given."""
    answer = listed()
    if as_json:
        common.emit({"kind": "approvals", **answer})
        return
    now_ms = answer["now_ms"]
    rows = [
        (one["id"], one["run_id"][:8], one["agent_id"], one["kind"], _clipped(_target(one)), _left(one, now_ms))
        for one in answer["requests"]
    ]
    rows += [
        (one["id"], one["run_id"][:8], one["agent_id"], "hermes", _clipped(one["command"] or one["description"]),
         "answers: " + " ".join(one["choices"]))
        for one in answer["hermes"]
    ]  # fmt: skip
    nothing = "nothing waits" if rows else f"nothing waits{_asking_off()}"
    terminal.print_table(("REQUEST", "RUN", "AGENT", "KIND", "TARGET", "WAITS"), rows, nothing=nothing)
    for one in answer["requests"]:
        for line in call_lines(one):
            common.say(common.visible(line))
    if answer["leases"]:
        leases = [
            (one["run_id"][:8], one["kind"], _clipped(one["target"]), one["duration"], times.utc(one["ends_ms"]))
            for one in answer["leases"]
        ]
        common.say("")
        terminal.print_table(("RUN", "KIND", "LEASED", "FOR", "ENDS"), leases, nothing="no lease")


@approvals.command(
    epilog=common.examples(
        "covenant approvals grant 3f9c --once --key ann", "covenant approvals grant 3f9c --until 10m --key ann"
    )
)
@click.argument("request")
@click.option("--once", is_flag=True, help="Grant one use.")
@click.option("--run", "for_run", is_flag=True, help="Grant it for as long as the run lives.")
@click.option("--until", metavar="TIME", help="Grant it for so long, such as 10m, at most 30d.")
@click.option("--any-arguments", is_flag=True, help="Grant every such call or request, with --run or --until.")
@click.option("--choice", metavar="WORD", help="Answer a run at a Hermes API with a word that it offers.")
@click.option("--key", "name", metavar="NAME", help="The operator key to sign with.  [default: the only one]")
@click.option("--ssh-agent", "agent", metavar="KEY", help="Sign with a key of ssh-agent: its comment or fingerprint.")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@_JSON
def grant(
    request: str,
    once: bool,
    for_run: bool,
    until: str | None,
    any_arguments: bool,
    choice: str | None,
    name: str | None,
    agent: str | None,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Grant REQUEST by a lease that an operator signs: for one use, for the run, or for a time.

    The lease holds for the very target of the request in its run, and for nothing else. For a call of a tool that is
    the call with these arguments; with --any-arguments each call that the manifest allows. A run at a Hermes API is
    answered without a lease: `once`, `session` for --run, or another word that it offers.
    """
    duration, lasts_ms = ("", 0) if choice is not None else _duration(once=once, for_run=for_run, until=until)
    if choice is not None and (once or for_run or until is not None):
        raise errors.UsageError("--choice stands alone", hint="give --once, --run, --until or --choice")
    held = _held(request)
    if "choices" in held:
        if until is not None:
            raise errors.UsageError("a run at a Hermes API takes no time", hint="give --once, --run or --choice")
        _answer_hermes(held, choice or ("once" if once else "session"), as_json=as_json)
        return
    if choice is not None:
        raise errors.UsageError("--choice is for a run at a Hermes API", hint="give --once, --run or --until")
    door = common.door(name or (None if agent else _only_key()), agent, passphrase_file)
    if any_arguments:
        held = {**held, "target": _whole_tool(held, duration)}
    lease = give(held, door, duration=duration, lasts_ms=lasts_ms)
    if as_json:
        common.emit({"kind": "approval_granted", **lease})
        return
    how = {"once": "for one use", "run": "for the run", "until": f"until {times.utc(lease['ends_ms'])}"}[duration]
    common.say(common.visible(f"granted {lease['target']} to run {held['run_id'][:8]} {how}"))


@approvals.command(epilog=common.examples("covenant approvals deny 3f9c"))
@click.argument("request")
@_JSON
def deny(request: str, as_json: bool) -> None:
    """Deny REQUEST. The same target is denied for a minute without a question."""
    held = _held(request)
    if "choices" in held:
        _answer_hermes(held, "deny", as_json=as_json)
        return
    denied = ask("deny", request=held["id"])["denied"]
    if as_json:
        common.emit({"kind": "approval_denied", **denied})
        return
    common.say(common.visible(f"denied {denied['target']}"))


@approvals.command(epilog=common.examples("covenant approvals watch --once --key bot -- ./decide"))
@click.argument("program", nargs=-1, required=True)
@click.option("--once", is_flag=True, help="Grant one use.")
@click.option("--run", "for_run", is_flag=True, help="Grant it for as long as the run lives.")
@click.option("--until", metavar="TIME", help="Grant it for so long, such as 10m, at most 30d.")
@click.option("--key", "name", metavar="NAME", help="The operator key to sign with.  [default: the only one]")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
def watch(
    program: tuple[str, ...],
    once: bool,
    for_run: bool,
    until: str | None,
    name: str | None,
    passphrase_file: str | None,
) -> None:
    """Let PROGRAM decide about each request, until this command is interrupted.

    PROGRAM gets the request as one JSON document on stdin. With exit status 0 it is granted, with 3 it is denied; with
    any other, and after its time, it goes on waiting for an operator. PROGRAM has the rights of this command.
    """
    duration, lasts_ms = _duration(once=once, for_run=for_run, until=until)
    door = common.door(name or _only_key(), None, passphrase_file)
    seen: set[str] = set()
    while True:
        answer = ask("list")
        for held in answer["requests"]:
            if held["id"] in seen:
                continue
            seen.add(held["id"])
            status = _decided(program, held, (held["ends_ms"] - answer["now_ms"]) / 1000)
            try:
                if status == 0:
                    give(held, door, duration=duration, lasts_ms=lasts_ms)
                elif status == _DENIES:
                    ask("deny", request=held["id"])
            except errors.NoApprovalError:
                status = None  # answered by another, or over
            word = {0: "granted", _DENIES: "denied"}.get(-1 if status is None else status, "left")
            common.say(common.visible(f"{word} {held['target']} of run {held['run_id'][:8]}"))
        seen &= {one["id"] for one in answer["requests"]}
        time.sleep(_WATCH_SECONDS)


def _decided(program: tuple[str, ...], held: dict[str, Any], seconds: float) -> int | None:
    """Return the exit status of the program for a request. None where it gave none in time.

    Raises:
        errors.UsageError: it cannot be started.
    """
    try:
        done = subprocess.run(program, input=json.dumps(held).encode(), timeout=max(0.1, seconds), check=False)
    except subprocess.TimeoutExpired:
        return None
    except OSError as e:
        raise errors.UsageError(f"`{program[0]}` cannot be started: {e.strerror}", hint="name a program") from e
    return done.returncode


def _duration(*, once: bool, for_run: bool, until: str | None) -> tuple[str, int]:
    """Return the duration of a lease, and its most milliseconds.

    Raises:
        errors.UsageError: none is given, or several.
    """
    if once + for_run + (until is not None) != 1:
        hint = "give --once, --run or --until"
        raise errors.UsageError("a lease is for one use, for the run or for a time", hint=hint)
    if until is not None:
        return "until", times.duration_ms(until, option="--until")
    return ("once", _ONCE_MS) if once else ("run", _RUN_MS)


@approvals.command(epilog=common.examples("covenant approvals export 1f3a"))
@click.argument("run")
@_JSON
def export(run: str, as_json: bool) -> None:
    """Print the lines of agent.toml that grant what leases granted to RUN, for the next signature.

    An entry of the same host with on_deny = "ask" is to be taken out; `covenant manifest check` says so.
    """
    from covenant.cli.audit import read_logs
    from policy.leases import exported

    if not run:
        raise errors.NoRunError("no run has an empty id", hint="covenant audit recent --kind approval_granted")
    logs = [log for log in read_logs.read_logs() if log.name == "supervisor"]
    kinds = (json.loads(line)["kind"] for log in logs for line in log.events.splitlines())
    found = exported.of_rows(kinds, run)
    runs = {str(kind["run_id"]) for kind, _ in found}
    if len(runs) != 1:
        how = f"{len(runs)} runs with leases begin" if runs else "no run with a lease begins"
        hint = "covenant audit recent --kind approval_granted"
        raise errors.NoRunError(f"{how} with `{run[:64]}`", hint=hint)
    if as_json:
        grants = [{"target": kind["target"], "signers": kind["signers"], "add": list(lines)} for kind, lines in found]
        common.emit({"kind": "approvals_exported", "run_id": min(runs), "grants": grants})
        return
    for kind, lines in found:
        common.say(common.visible(f"# {kind['target']}: granted {kind['duration']} by {', '.join(kind['signers'])}"))
        for line in lines:
            common.say(common.visible(line))
        common.say("")


def give(held: dict[str, Any], door: Signer, *, duration: str, lasts_ms: int) -> dict[str, Any]:
    """Sign a lease for a request and give it to its run. Return the lease.

    Raises:
        errors.CovenantError: it was not signed, or was refused.
    """
    from covenant.keys import leasing

    now_ms = times.now_ms()
    raw, _ = leasing.lease_of(held, door, duration=duration, expires_ms=now_ms + lasts_ms, now_ms=now_ms)
    lease: dict[str, Any] = ask("grant", request=held["id"], lease=raw.decode("ascii"))["lease"]
    return lease


def grant_unasked(held: dict[str, Any], duration: str) -> str:
    """Give a lease, signed with the only key, which has no passphrase. Return words about it.

    Raises:
        errors.CovenantError: there are other keys, it has a passphrase, or the lease is refused.
    """
    from covenant.keys import keystore, signers

    by_hand = f"covenant approvals grant {held['id'][:4]} --once --key NAME"
    name = _only_key()
    if name is None or keystore.entry(common.home(), name).file.sealed is not None:
        raise errors.KeyFileError("no only key without a passphrase is here to sign with", hint=by_hand)
    door = signers.key_file(common.home(), name, lambda: b"")
    lasts_ms, how = _UNASKED[duration]
    lease = give(held, door, duration=duration, lasts_ms=lasts_ms)
    return f"granted {lease['target']} {how}"


def listed() -> dict[str, Any]:
    """Return what waits in the runs of this machine (``requests``, ``leases``) and at a Hermes API (``hermes``).

    Raises:
        errors.CovenantError: neither the runs nor the daemon can be asked.
    """
    from covenant.cli.daemon import client

    hermes: list[dict[str, Any]] | None = None
    with contextlib.suppress(errors.CovenantError):
        hermes = client.ask("list_approvals")["approvals"]
    try:
        answer = ask("list")
    except errors.CovenantError:
        if hermes is None:
            raise
        answer = {"requests": [], "leases": [], "now_ms": times.now_ms()}
    return {**answer, "hermes": hermes or []}


def ask(verb: str, **fields: Any) -> dict[str, Any]:
    """Return the answer of the supervisor, or of this process where there is none.

    Raises:
        errors.PrivilegeError: there is none, and this is not root.
        errors.CovenantError: it was refused.
    """
    from covenant.cli.run import supervisor_client

    with supervisor_client.supervisor() as sock:
        if sock is not None:
            from sandbox.serve.api import client

            return client.ask(sock, "approvals", verb=verb, **fields)
    if os.geteuid() != 0:
        raise errors.PrivilegeError("runs are root's to look at where no supervisor listens", hint="run it with sudo")
    from sandbox.control import approvals as control
    from sandbox.control import manager

    return control.VERBS[verb](common.state(), manager.Requester("operator@local", root=True), **fields)


def _asking_off() -> str:
    """Return words that say so where this host asks no operator, as far as this user may read it."""
    from sandbox import config

    with contextlib.suppress(errors.CovenantError, OSError):
        settings = config.load(common.readable_state())
        if not settings.ask_operators:
            return f": this host asks no operator; write ask_operators = true in {config.file_of(settings.state)}"
    return ""


def call_lines(held: dict[str, Any]) -> list[str]:
    """Return the lines about a call that waits: its digest, class and arguments. None for another request."""
    digest = held["target"].removeprefix(_target(held)).strip()
    if not digest:
        return []
    if held["kind"] == "inject":
        return [f"{held['id']}: all that is sent {digest}", f"  {held['arguments']}"]
    return [f"{held['id']}: side effect {held['side_effect']}, arguments {digest}", f"  {held['arguments']}"]


def _clipped(text: str) -> str:
    return terminal.clipped(text, _TARGET)


def _target(held: dict[str, Any]) -> str:
    """Return the target of a request as its column has it: the tool of a call, the method and URL of a request."""
    from policy.leases import targets

    target: str = held["target"]
    return (targets.tool(target) or target) if held["kind"] in targets.CALLS else target


def _whole_tool(held: dict[str, Any], duration: str) -> str:
    """Return the target of a lease for every call of the tool that is asked about, or every such request.

    Raises:
        errors.UsageError: it is no call, or the lease is for one use.
    """
    from policy.leases import targets

    if held["kind"] not in targets.CALLS or duration == "once":
        message = "--any-arguments is for a tool or a request, and not for one use"
        raise errors.UsageError(message, hint="give it with --run or --until, for the kind tool or inject")
    return _target(held)


def _held(request: str) -> dict[str, Any]:
    answer = listed()
    found = [one for one in (*answer["requests"], *answer["hermes"]) if request and one["id"].startswith(request)]
    if len(found) != 1:
        how = f"{len(found)} requests begin with" if found else "no request begins with"
        raise errors.NoApprovalError(f"{how} `{request[:64]}`", hint="covenant approvals list shows what waits")
    held: dict[str, Any] = found[0]
    return held


def _only_key() -> str | None:
    """Return the name of the operator's key where there is one alone."""
    from covenant.keys import keystore

    names = [one.name for one in keystore.entries(common.home())]
    return names[0] if len(names) == 1 else None


def _answer_hermes(held: dict[str, Any], choice: str, *, as_json: bool) -> None:
    from covenant.cli.daemon import client

    response = client.ask("resolve_approval", approval_id=held["id"], choice=choice)
    if as_json:
        common.emit(client.envelope("approval_resolved", response))
        return
    common.say(f"answered with `{common.visible(choice)}`, {response['resolved']} resolved")


def _left(one: dict[str, Any], now_ms: int) -> str:
    return f"{max(0, one['ends_ms'] - now_ms) // 1000} s more"

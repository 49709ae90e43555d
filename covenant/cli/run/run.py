"""``covenant run`` and ``covenant dev``: use the supervisor, or as root run the same code in this process."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli import common, spinner
from covenant.cli.run import detach_keys as keys
from covenant.cli.run import supervisor_client
from covenant.cli.run.how import PLAIN, How
from covenant.cli.run.stderr import ShownStderr
from policy import errors

if TYPE_CHECKING:
    import socket

    from covenant.cli.run import streams
    from policy.learn.observed import Observed
    from policy.package import Package
    from sandbox.run_result import RunResult
    from sandbox.supervisor import Supervisor

# A year is longer than any other timeout of a run; infinity has no value in milliseconds.
_TIMEOUT = click.option(
    "--timeout", type=click.FloatRange(0.001, 365 * 86_400), metavar="SECONDS", help="Wait at most this long."
)

_RAW = click.option("--raw", is_flag=True, help="In a terminal: pass on clipboard and title-report sequences too.")
_RECORD = click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="In a terminal: record what the agent shows as an asciicast.",
)

_WORKSPACE = click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The directory that the agent works on, for a manifest with [workspace]; changes are kept apart.",
)
_RESUME = click.option(
    "--resume",
    metavar="RUN",
    help="Go on with the changes of an earlier run of this agent; its directory is given again.",
)
_KEEP_WORKSPACE = click.option(
    "--keep-workspace", is_flag=True, help="Keep the workspace for --resume, also when nothing is changed in it."
)
_KEEP = click.option(
    "--keep", is_flag=True, help="In a terminal: let the session go on when this command ends or is killed."
)
WAIT = click.option(
    "--wait",
    type=click.FloatRange(0, 365 * 86_400),
    default=0.0,
    metavar="SECONDS",
    help="While another run writes the same path, ask again for at most this long.",
)
_DETACH = click.option("--detach", is_flag=True, help="Start a session with a terminal, print its id, and leave it.")

_AT_WORK: Final = "the agent is at work"
# As `covenant ps` shows the id of a run: its beginning or all of it.
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f-]{0,27})?")


@click.command(
    epilog=common.examples(
        'covenant run agents/hello "good morning"',
        'covenant run agents/hello "good morning" --timeout 30 --json',
        'covenant run agents/default.json "read the notes" --entry main.py',
    )
)
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("text", required=False)
@_TIMEOUT
@click.option("--as", "user", metavar="USER", help="trusted-local only: the user to drop to.")
@_RAW
@_RECORD
@_DETACH
@_KEEP
@keys.OPTION
@_WORKSPACE
@_RESUME
@_KEEP_WORKSPACE
@WAIT
@click.option(
    "--learn",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Observe the run, and write a package there that grants only what it used.",
)
@click.option(
    "--entry",
    type=click.Path(path_type=Path),
    metavar="PROGRAM",
    help="The program of a tool manifest, where PACKAGE is that file alone: PROGRAM.py, .js, or a native program.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def run(
    package: Path,
    text: str | None,
    timeout: float | None,
    user: str | None,
    raw: bool,
    record: Path | None,
    detach: bool,
    keep: bool,
    detach_keys: str,
    workspace: Path | None,
    resume: str | None,
    keep_workspace: bool,
    wait: float,
    learn: Path | None,
    entry: Path | None,
    as_json: bool,
) -> int:
    """Run the signed PACKAGE with the intent TEXT (``-`` reads it from stdin) and print its answer.

    A package with the contract `stdio` or `terminal` takes no TEXT: it is connected to stdin, stdout and stderr, or to
    the terminal, and its exit status is passed on.

    A tool manifest, FILE.json with --entry, is run as `covenant dev` runs a package: signed with the local key.
    """
    if _RUN_ID.fullmatch(str(package)) and not package.exists():
        raise errors.UsageError(
            f"`{package}` is the id of a run, and `run` starts a package",
            hint="give a package's directory; `covenant logs`, `wait`, `attach` and `attest` take a run",
        )
    common.check_package(package)
    own = (record, user, workspace, resume, wait or None, learn)
    if entry is not None or (package.suffix == ".json" and not package.is_dir()):
        if text is None or any((raw, detach, keep, keep_workspace)) or any(one is not None for one in own):
            raise errors.UsageError(
                "a tool manifest is run with TEXT, --entry, --timeout and --json", hint="leave other options out"
            )
        return _run_single_file(package, entry, text, _milliseconds(timeout), as_json=as_json)
    others = (text, *own)
    if detach and (keep or as_json or any(one is not None for one in others)):
        raise errors.UsageError(
            "--detach starts a session: no TEXT, --keep, --record, --workspace, --wait, --json, --learn or --as",
            hint="leave the others out",
        )
    if detach:
        from covenant.cli.run import session as sessions

        return sessions.start_detached(package, _milliseconds(timeout))
    how = How(
        raw=raw,
        record=record,
        keys=keys.parse(detach_keys),
        keep=keep,
        workspace=resumed_directory(workspace, resume),
        resume=resume or "",
        keep_workspace=keep_workspace,
        wait=wait,
    )
    if keep_workspace and how.workspace is None:
        raise errors.UsageError("--keep-workspace needs --workspace", hint="give --workspace DIR")
    if learn is None:
        return _run(package, text, timeout, user, how=how, as_json=as_json, dev=False)
    from covenant.cli.policy import narrow

    def observed(seen: Observed) -> int:
        return _run(package, text, timeout, user, how=how._replace(observe=seen), as_json=as_json, dev=False)

    return narrow.run_and_learn(package, learn, how.workspace, observed, quiet=as_json)


def resumed_directory(workspace: Path | None, resume: str | None, *, here: bool = False) -> Path | None:
    """Return the directory of a run: the one that is given, else that of the run that it resumes.

    Raises:
        errors.WorkspaceError: this user has no workspace of that run.
    """
    if workspace is not None or resume is None:
        return workspace
    from covenant.cli.operator import workspace_client

    return Path(workspace_client.find(resume, here=here)["directory"])


@click.command(epilog=common.examples('covenant dev mine "good morning"'))
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("text", required=False)
@_TIMEOUT
@_RAW
@_RECORD
@_WORKSPACE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def dev(
    package: Path,
    text: str | None,
    timeout: float | None,
    raw: bool,
    record: Path | None,
    workspace: Path | None,
    as_json: bool,
) -> int:
    """Sign PACKAGE with a local key that holds for this agent id on this host only, then run it."""
    common.check_package(package)
    how = How(raw=raw, record=record, workspace=workspace)
    return _run(package, text, timeout, None, how=how, as_json=as_json, dev=True)


@click.command(epilog=common.examples("covenant stdio mine", "covenant stdio mine --timeout 3600"))
@click.argument("package", type=click.Path(path_type=Path))
@_TIMEOUT
def stdio(package: Path, timeout: float | None) -> int:
    """Connect stdin, stdout and stderr to the signed PACKAGE, for an editor or an MCP client.

    Nothing but the agent's bytes comes on stdout, and its exit status is passed on; 125 is a refusal.
    """
    return connect(package, _milliseconds(timeout), how=How(quiet=True))


def _milliseconds(timeout: float | None) -> int | None:
    # NaN passes every range comparison.
    if timeout is not None and math.isnan(timeout):
        raise errors.UsageError("--timeout `nan` is no number of seconds")
    return None if timeout is None else int(timeout * 1000)


def connect(source: Path | Package, timeout_ms: int | None, *, dev: bool = False, how: How, name: str = "") -> int:
    """Connect this process's streams to a package. Returns its exit status, or 125 for a refusal.

    ``name`` is that of a command that was typed, which has its package in memory. It replaces the path in listings, and
    packages of one agent id and one name run beside each other (rule 8).
    """
    from covenant.cli.run import session as sessions

    def here(connection: streams.SessionPipes) -> RunResult:
        return _here(
            source,
            "",
            timeout_ms,
            None,
            dev=dev,
            as_json=how.quiet,
            connection=connection,
            name=name,
            how=how,
        )

    if not isinstance(source, Path):
        raw = source.manifest
        return sessions.status_of(sessions.stream_in(raw), None, timeout_ms, here, how=how, manifest=raw)
    return sessions.status_of(
        sessions.stream_of(source), None if dev or how.observe is not None else source, timeout_ms, here, how=how
    )


def _run(
    path: Path,
    text: str | None,
    timeout: float | None,
    user: str | None,
    *,
    how: How,
    as_json: bool,
    dev: bool,
) -> int:
    timeout_ms = _milliseconds(timeout)
    if text is None:
        from covenant.cli.run import session as sessions

        if sessions.stream_of(path) is None:
            hint = f"covenant {'dev' if dev else 'run'} PACKAGE TEXT; `-` reads TEXT from stdin"
            raise errors.UsageError("there is no intent", hint=hint)
        if as_json or user is not None:
            raise errors.UsageError(
                "a session has no --json and no --as: its stdout is the agent's", hint="leave the option out"
            )
        return connect(path, timeout_ms, dev=dev, how=how)
    if how.raw or how.keep or how.record is not None:
        raise errors.UsageError(
            "--raw, --record and --keep are for a session with a terminal",
            hint="leave the option out, or leave TEXT out",
        )
    shown = ShownStderr()
    if how.wait:
        from covenant.cli.run import waiting

        # stdin is read once.
        words = common.intent_text(text)
        return waiting.until_free(
            how.wait,
            lambda: _answered(path, words, timeout_ms, user, shown, how=how, as_json=as_json, dev=dev),
            quiet=as_json,
        )
    return _answered(path, text, timeout_ms, user, shown, how=how, as_json=as_json, dev=dev)


def _answered(
    path: Path,
    text: str,
    timeout_ms: int | None,
    user: str | None,
    shown: ShownStderr,
    *,
    how: How,
    as_json: bool,
    dev: bool,
) -> int:
    """Ask a supervisor for the run, or run it here, and report the answer. Returns the exit status."""
    # dev signs with root's local key, which is not available over a socket, as what is observed is not.
    if not dev and how.observe is None:
        with supervisor_client.supervisor() as sock:
            if sock is not None:
                answer = _asked(sock, path, common.intent_text(text), timeout_ms, user, shown, as_json=as_json, how=how)
                return _reported(answer, shown, how, as_json=as_json, here=False)
    answer = _here(path, text, timeout_ms, user, dev=dev, as_json=as_json, shown=shown, how=how)
    return _reported(answer, shown, how, as_json=as_json, here=True)


def _reported(answer: RunResult, shown: ShownStderr, how: How, *, as_json: bool, here: bool) -> int:
    """Report the answer, and say where the changes of its workspace are."""
    status = _report(answer, shown, as_json=as_json)
    if how.workspace is not None and not as_json:
        from covenant.cli.operator import workspace_review

        workspace_review.end_session(answer.run_id, ask=False, here=here)
    return status


def _run_single_file(file: Path, entry: Path | None, text: str, timeout_ms: int | None, *, as_json: bool) -> int:
    """Run a tool manifest with a program, signed with the local key. What it allows and is not granted is printed."""
    from covenant.session import single_file

    made = single_file.read(file, entry)
    for loss in made.losses:
        common.say(common.visible(f"not granted: {loss.message}"), err=True)
    shown = ShownStderr()
    answer = _here(made.package, text, timeout_ms, None, dev=True, as_json=as_json, shown=shown, place=file)
    return _report(answer, shown, as_json=as_json)


def _asked(
    sock: socket.socket,
    path: Path,
    text: str,
    timeout_ms: int | None,
    user: str | None,
    shown: ShownStderr,
    *,
    as_json: bool,
    how: How,
) -> RunResult:
    """Request the run from a supervisor, which reads the package through our descriptor."""
    from sandbox.serve.api import client

    with ExitStack() as held:
        directory = supervisor_client.open_package(path)
        held.callback(os.close, directory)
        workspace = held.enter_context(supervisor_client.given_workspace(how))
        with shown.waiting as stack:

            def said(state: Mapping[str, Any]) -> None:
                supervisor_client.say_whose(state)
                if state.get("state") == "accepted":
                    stack.enter_context(spinner.shown(_AT_WORK, quiet=as_json))
                elif state.get("state") == "asked":
                    shown.show_asked(state)

            return client.run(
                sock,
                directory,
                text,
                timeout_ms=timeout_ms,
                user=user,
                stderr=shown.show,
                said=said,
                workspace=workspace,
            )


def _here(
    source: Path | Package,
    text: str,
    timeout_ms: int | None,
    user: str | None,
    *,
    dev: bool,
    as_json: bool,
    connection: streams.SessionPipes | None = None,
    name: str = "",
    shown: ShownStderr | None = None,
    how: How = PLAIN,
    place: Path | None = None,
) -> RunResult:
    """Run the agent with the supervisor's code in this process. A session has a ``connection`` and no intent.

    ``place`` is the file that a package in memory was made from.
    """
    from covenant.keys import identity
    from sandbox.storage import package_reader as packages
    from sandbox.supervisor import Request, Supervisor

    home, state = common.home(), common.state()
    place = source if isinstance(source, Path) else place
    # Raises without root, before a key or a directory is made.
    opening = Supervisor(state, never_granted=(str(home),))
    intent, issuer = common.intent_text(text), identity.issuer(home)
    with opening as supervisor:
        if connection is None or not as_json:
            supervisor_client.say_whose_here(home, supervisor)
        with supervisor.logged(issuer):
            package, dev_id = packages.read(source) if isinstance(source, Path) else source, ""
            if dev:
                package, dev_id = _signed_for_dev(package, supervisor, quiet=connection is not None and as_json)
        waiting = ExitStack() if shown is None else shown.waiting
        beside = packages.beside(source) if isinstance(source, Path) else nullcontext()
        with beside as children, waiting, supervisor_client.given_here(how) as given:
            waiting.enter_context(spinner.shown(_AT_WORK, quiet=as_json or connection is not None))
            if connection is not None:
                connection.begin()
            return supervisor.run(
                Request(
                    package=package,
                    text=intent,
                    issuer=issuer,
                    timeout_ms=timeout_ms,
                    user=user,
                    dev=dev_id,
                    typed=bool(name),
                    package_name=name or ("" if place is None else str(place.resolve())),
                    children=children,
                    caller=None if connection is None else connection.streams,
                    live=None if shown is None else shown.show,
                    asks=None if shown is None else shown.show_asked,
                    workspace=given,
                    observe=how.observe,
                )
            )


def _signed_for_dev(read: Package, supervisor: Supervisor, *, quiet: bool) -> tuple[Package, str]:
    """Return the package with the local key's envelope, and the agent id that the key may sign."""
    from covenant.keys import signing
    from policy import decide

    manifest = decide.manifest_of(read)
    now_ms = int(time.time() * 1000)
    signed, dev_state = signing.dev(read, manifest, supervisor.state, host=supervisor.config.host, now_ms=now_ms)
    dev_state.close()
    if not quiet:
        common.say(
            "dev: signed with a local key that holds for this agent id on this host; not an operator's signature",
            err=True,
        )
    return signed, manifest.agent.id


def _report(answer: RunResult, shown: ShownStderr, *, as_json: bool) -> int:
    shown.show_rest(answer.stderr)
    for name in answer.unknown_sections:
        common.say(f"note: section [{common.visible(name)}] of agent.toml is not known and grants nothing", err=True)
    for line in answer.not_enforced:
        common.say(f"not enforced: {common.visible(line)}", err=True)
    if answer.denials:
        from covenant.cli.policy import denials

        denials.remark(answer.denials, answer.run_id)
    if answer.error is not None:
        if as_json:
            common.emit({**answer.error.to_json(), "run_id": answer.run_id, "policy_digest": answer.policy_digest})
            return common.EXIT_FAILED
        raise answer.error
    assert answer.result is not None
    if as_json:
        common.emit(
            {
                "kind": "intent_result",
                "intent_id": answer.intent_id,
                "status": "ok",
                "text": answer.result.text,
                "sources": list(answer.result.sources),
                "settlement": None,
                "run_id": answer.run_id,
                "policy_digest": answer.policy_digest,
            }
        )
        return common.EXIT_DONE
    # A program ends its last line itself.
    common.say(common.visible(answer.result.text, newlines=True).removesuffix("\n"))
    for source in answer.result.sources:
        common.say(f"  source: {common.visible(source)}")
    return common.EXIT_DONE

"""``covenant run`` and ``covenant dev``: use the supervisor, or as root run the same code in this process."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli import common, spinner
from covenant.cli.run import supervisor_client
from policy import errors

if TYPE_CHECKING:
    import socket

    from policy.package import Package
    from sandbox.serve.api import client
    from sandbox.supervisor import RunResult, Supervisor

# A year is longer than any other timeout of a run; infinity has no value in milliseconds.
_TIMEOUT = click.option(
    "--timeout", type=click.FloatRange(0.001, 365 * 86_400), metavar="SECONDS", help="Wait at most this long."
)

_AT_WORK: Final = "the agent is at work"


@click.command(
    epilog=common.examples(
        'covenant run agents/hello "good morning"', 'covenant run agents/hello "good morning" --timeout 30 --json'
    )
)
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("text")
@_TIMEOUT
@click.option("--as", "user", metavar="USER", help="trusted-local only: the user to drop to.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def run(package: Path, text: str, timeout: float | None, user: str | None, as_json: bool) -> int:
    """Run the signed PACKAGE with the intent TEXT (``-`` reads it from stdin) and print its answer."""
    return _run(package, text, timeout, user, as_json=as_json, dev=False)


@click.command(epilog=common.examples('covenant dev mine "good morning"'))
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("text")
@_TIMEOUT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def dev(package: Path, text: str, timeout: float | None, as_json: bool) -> int:
    """Sign PACKAGE with a local key that holds for this agent id on this host only, then run it."""
    return _run(package, text, timeout, None, as_json=as_json, dev=True)


def _run(path: Path, text: str, timeout: float | None, user: str | None, *, as_json: bool, dev: bool) -> int:
    # NaN passes every range comparison.
    if timeout is not None and math.isnan(timeout):
        raise errors.UsageError("--timeout `nan` is no number of seconds")
    timeout_ms = None if timeout is None else int(timeout * 1000)
    if not dev:  # dev signs with root's local key, which is not available over a socket
        with supervisor_client.supervisor() as sock:
            if sock is not None:
                return _report(_asked(sock, path, _text(text), timeout_ms, user, as_json=as_json), as_json=as_json)
    return _report(_here(path, text, timeout_ms, user, dev=dev, as_json=as_json), as_json=as_json)


def _asked(
    sock: socket.socket, path: Path, text: str, timeout_ms: int | None, user: str | None, *, as_json: bool
) -> client.Answer:
    """Request the run from a supervisor, which reads the package through our descriptor."""
    from sandbox.serve.api import client

    try:
        # Opened as by the package reader: only a directory, and no symlink.
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        reason = "it is a symlink" if os.path.islink(path) else e.strerror
        raise errors.PackageError(f"package `{path}` cannot be read: {reason}", where=str(path)) from e
    try:
        with ExitStack() as stack:

            def said(state: Mapping[str, Any]) -> None:
                supervisor_client.say_whose(state)
                if state.get("state") == "accepted":
                    stack.enter_context(spinner.shown(_AT_WORK, quiet=as_json))

            return client.run(sock, directory, text, timeout_ms=timeout_ms, user=user, said=said)
    finally:
        os.close(directory)


def _here(path: Path, text: str, timeout_ms: int | None, user: str | None, *, dev: bool, as_json: bool) -> RunResult:
    """Run the agent with the supervisor's code in this process."""
    from covenant.keys import identity
    from sandbox.storage import package_reader as packages
    from sandbox.supervisor import Request, Supervisor

    home, state = common.home(), common.state()
    # Raises without root, before a key or a directory is made.
    opening = Supervisor(state, never_granted=(str(home),))
    intent, issuer = _text(text), identity.issuer(home)
    with opening as supervisor:
        _say_whose(home, supervisor)
        with supervisor.logged(issuer):
            package, dev_id = _signed_for_dev(path, supervisor) if dev else (packages.read(path), "")
        with packages.beside(path) as children, spinner.shown(_AT_WORK, quiet=as_json):
            return supervisor.run(
                Request(
                    package=package,
                    text=intent,
                    issuer=issuer,
                    timeout_ms=timeout_ms,
                    user=user,
                    dev=dev_id,
                    package_name=str(path.resolve()),
                    children=children,
                )
            )


def _say_whose(home: Path, supervisor: Supervisor) -> None:
    version = supervisor.state.root_version()
    trust = f"trust root version {version}" if version else "no trust root"
    common.say(f"home {common.visible(str(home))}, state {common.visible(str(supervisor.path))}, {trust}", err=True)


def _signed_for_dev(path: Path, supervisor: Supervisor) -> tuple[Package, str]:
    """Return the package with the local key's envelope, and the agent id that the key may sign."""
    from covenant.keys import signing
    from policy import decide
    from sandbox.storage import package_reader as packages

    read = packages.read(path)
    manifest = decide.manifest_of(read)
    now_ms = int(time.time() * 1000)
    signed, dev_state = signing.dev(read, manifest, supervisor.state, host=supervisor.config.host, now_ms=now_ms)
    dev_state.close()
    common.say(
        "dev: signed with a local key that holds for this agent id on this host; not an operator's signature",
        err=True,
    )
    return signed, manifest.agent.id


def _text(text: str) -> str:
    from policy import contract

    if text != "-":
        return text
    if sys.stdin is None:
        raise errors.UsageError("there is no stdin to read the intent from")
    raw = common.typed(contract.INTENT_BYTES + 1)
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise errors.UsageError("the intent on stdin is not UTF-8") from e


def _report(answer: RunResult | client.Answer, *, as_json: bool) -> int:
    for name in answer.unknown_sections:
        common.say(f"note: section [{common.visible(name)}] of agent.toml is not known and grants nothing", err=True)
    for line in answer.not_enforced:
        common.say(f"not enforced: {common.visible(line)}", err=True)
    common.remark_stderr(answer.stderr)
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
    common.say(common.visible(answer.result.text, newlines=True))
    for source in answer.result.sources:
        common.say(f"  source: {common.visible(source)}")
    return common.EXIT_DONE

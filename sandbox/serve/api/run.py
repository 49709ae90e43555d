"""The request to run a package: its bytes by the descriptor that came, and the answer as a document."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import structs

from policy import contract, errors
from policy.audit_log import chain
from policy.package import MANIFEST_NAME, Package
from policy.signing import trust
from sandbox.audit import open_runs
from sandbox.audit.run_report import RunReportReader
from sandbox.kernel.fs import hanging
from sandbox.lifecycle.run import Request
from sandbox.lifecycle.types import DaemonTools
from sandbox.run_io import CallerStreams
from sandbox.run_result import RunResult
from sandbox.serve.api import protocol, rlimits
from sandbox.serve.api.session import Session
from sandbox.shim import signals as shim_signals
from sandbox.storage import package_reader as packages
from sandbox.supervisor import Supervisor
from sandbox.workspace.session import GivenDirectory

# What root's own package may take at least, of each access to it.
ROOT_SECONDS: Final = 60.0


def session(session: Session, asked: protocol.SessionRequest) -> None:
    """Open a session, and answer with how it ended.

    Raises:
        errors.CovenantError: it was refused, or the machine failed; either is in the log.
    """
    # A terminal hears itself of its caller's leaving, which it may outlive.
    request = protocol.RunRequest(kind="run", text="", timeout_ms=asked.timeout_ms, detach=asked.terminal is not None)
    given = _given(session, asked) if asked.workspace else None
    run(session, request, _caller(session, asked), given)


def _caller(session: Session, asked: protocol.SessionRequest) -> CallerStreams:
    """Return the caller's ends of a session.

    Raises:
        errors.RequestError: a descriptor is no pipe.
    """
    if not asked.attached:
        assert asked.terminal is not None
        return CallerStreams(-1, -1, size=(asked.terminal.rows, asked.terminal.columns), stays=True)
    stdin, stdout = session.pipe(1, os.O_RDONLY), session.pipe(2, os.O_WRONLY)
    if asked.terminal is None:
        return CallerStreams(stdin, stdout, stderr=session.pipe(3, os.O_WRONLY))
    return CallerStreams(
        stdin,
        stdout,
        size=(asked.terminal.rows, asked.terminal.columns),
        resizes=session.pipe(3, os.O_RDONLY),
        recording=session.pipe(4, os.O_WRONLY) if asked.recording else -1,
        stays=asked.keep,
        line=session.sock.fileno(),
    )


def _given(session: Session, asked: protocol.RunRequest | protocol.SessionRequest) -> GivenDirectory:
    """Return the workspace that the client gives, which its own rights opened: the last of its descriptors.

    Raises:
        errors.RequestError: the descriptor is no directory.
    """
    from sandbox.workspace import caller

    who, last = session.caller, asked.descriptors - 1
    fd = session.directory(last - asked.repository)
    repository = session.directory(last) if asked.repository else -1
    if who.uid != 0:
        identity = caller.CallerIdentity(who.uid, who.gid, who.groups)
    else:
        # Root gives its owner's rights, not its own.
        info = os.fstat(fd)
        identity = caller.of(info.st_uid, info.st_gid)
    return GivenDirectory(fd, identity, asked.resume or "", who.uid, asked.keep_workspace, repository)


def run(
    session: Session,
    asked: protocol.RunRequest,
    caller: CallerStreams | None = None,
    given: GivenDirectory | None = None,
) -> None:
    """Run it, and answer with what came of it.

    ``caller`` are the caller's ends of a session, ``given`` is the workspace of one.

    Raises:
        errors.CovenantError: it was refused, or the machine failed; either is in the log.
    """
    if asked.user is not None and session.caller.uid != 0:
        raise errors.CallerError("only root may say which user an agent becomes", hint="leave --as out")
    directory = session.directory(0)
    if asked.workspace:
        given = _given(session, asked)
    with shim_signals.DeferredSignals() as signals, contextlib.ExitStack() as after:
        try:
            with session.opened() as own, contextlib.ExitStack() as stack:
                report_reader = RunReportReader(own.ledger)
                if asked.rows:
                    stack.push(functools.partial(send_report, session, own, report_reader))
                answer = _run(session, asked, own, directory, report_reader, after, caller, given)
            session.answer(document(answer))
        finally:
            signals.hold()  # what runs share on the uplink is taken away whole, or stays for good
        take_away(after)
    if signals.pending:
        raise KeyboardInterrupt


def take_away(after: contextlib.ExitStack) -> None:
    """Remove the rest of a run. The client has its answer by then, so an error goes to the operator (stderr)."""
    try:
        after.close()
    except errors.CovenantError as e:
        print(f"covenant-supervisor: {e.message}", file=sys.stderr, flush=True)


def _run(
    session: Session,
    asked: protocol.RunRequest,
    own: Supervisor,
    directory: int,
    report_reader: RunReportReader,
    after: contextlib.ExitStack,
    caller: CallerStreams | None,
    given: GivenDirectory | None,
) -> RunResult:
    issuer = session.issuer(own)
    run_ids: list[str] = []

    def began(run_id: str, since: tuple[int, int, int] | None) -> None:
        run_ids.append(run_id)
        report_reader.began(run_id, since)

    if caller is not None:
        caller = structs.replace(caller, told=lambda: session.state("started", run_id=run_ids[0]))
    session.state("accepted", supervisor_state=str(own.path), trust_root=own.state.root_version())
    with contextlib.ExitStack() as stack:
        with own.logged(issuer, report_reader.refused):
            if session.caller.uid == 0:
                with hanging.within(place_of(directory), _roots_seconds(session)):
                    package = packages.read(directory)
            else:
                package = verified(session, own, directory).package
            check_seen(package, asked.manifest_sha256)
        # Its children lie beside it; who may not look there has none.
        with in_their_name(session, own, place_of(directory)):
            children = stack.enter_context(packages.beside(directory))
            name = name_of(directory, session)
        request = Request(
            package=package,
            text=asked.text,
            issuer=issuer,
            timeout_ms=asked.timeout_ms,
            user=asked.user,
            package_name=name,
            intent_id=asked.intent_id or "",
            priority=asked.priority,
            children=children,
            rights=functools.partial(in_their_name, session, own, place_of(directory)),
            began=began,
            caller=caller,
            workspace=given,
            uid=session.caller.uid,
            credits=asked.credits,
            daemon=_daemon(session, asked),
            live=(lambda lines: session.state("stderr", text=lines)) if asked.stderr else None,
            asks=(lambda held: session.state("asked", **held)) if asked.stderr else None,
            **_for_whom(asked.on_behalf_of, issuer),
        )
        return own.run(request, watches=session.watches(detach=asked.detach), after=after)


def _daemon(session: Session, asked: protocol.RunRequest) -> DaemonTools | None:
    """Return the line to the client as an MCP server, which it gave behind the package's directory.

    Raises:
        errors.RequestError: the descriptor is no socket.
    """
    return None if asked.daemon_tools is None else DaemonTools(session.line(1), frozenset(asked.daemon_tools))


def check_seen(package: Package, digest: str | None) -> None:
    """Refuse a package whose manifest is not the one that the client decided by.

    Raises:
        errors.StaleAgentError: the package has another manifest by now.
    """
    if digest is not None and package.digests[MANIFEST_NAME] != digest:
        raise errors.StaleAgentError(
            "the package has another manifest than whoever asks has seen",
            hint="covenant agents reload, then ask again",
            where=MANIFEST_NAME,
        )


def _for_whom(whom: protocol.OnBehalfOf | None, issuer: Mapping[str, str]) -> dict[str, Any]:
    """Return the identity of a request, as the log writes it and as the agent is told it.

    The agent is told a name that no other identity has.
    """
    if whom is None:
        return {}
    told = contract.on_behalf(whom.display, whom.pubkey_b58, by=issuer["display"])
    return {"behalf": {"display": whom.display, "pubkey": whom.pubkey_b58}, "told": told}


def send_report(session: Session, own: Supervisor, report_reader: RunReportReader, *failure: object) -> None:
    """Send the rows of the run in the frame before the last, also where the run failed.

    A log that cannot be read delays no answer.
    """
    try:
        told = report_reader.read()
        if any(not open_runs.is_open(own.path, run_id) for run_id in report_reader.lost):
            # A shim below was killed: what it left is taken away now, so that its end and its use are known.
            with contextlib.suppress(errors.CovenantError, OSError):
                own.recover()
            told = report_reader.read()
        session.send_rows(told.document(chain.key_id(own.ledger.public_key)))
    except errors.CovenantError as e:
        session.send_rows({"kind": "rows", "missing": f"the supervisor could not read them: {e.message}"})


@contextlib.contextmanager
def in_their_name(session: Session, own: Supervisor, place: str) -> Iterator[None]:
    """Open files with the rights of the caller while the block lasts, and within its limits unless it is root.

    The shim of a child reads the caller's files too, before any signature is verified.

    Raises:
        errors.CovenantError: reading would exceed the limits.
    """
    if session.caller.uid == 0:
        with hanging.within(place, _roots_seconds(session)):
            yield
        return
    most = float(own.config.request_seconds)
    with (
        rlimits.turn(own.path, session.caller.uid, most),
        rlimits.memory(rlimits.PACKAGE_MEMORY),
        rlimits.seconds(most, "reading packages", place),
        session.caller.rights(),
    ):
        yield


def verified(session: Session, own: Supervisor, directory: int) -> trust.TrustedPackage:
    """The package of a caller: read with their rights and within their bounds, and verified before a second of theirs
    is read. ``lifecycle`` verifies it again, as it does for everybody.

    Raises:
        errors.CovenantError: it cannot be read, is not signed, or no operator's signature holds.
    """
    now_ms, most = int(time.time() * 1000), float(own.config.request_seconds)
    with rlimits.turn(own.path, session.caller.uid, most), rlimits.memory(rlimits.PACKAGE_MEMORY):
        with rlimits.seconds(most, "reading the package", place_of(directory)), session.caller.rights():
            package = packages.read(directory)
        if package.envelope is None:
            # allow_unsigned_trusted_local is for the operator, who writes the configuration, and not for callers.
            raise errors.UnsignedError("the package is not signed", hint="covenant manifest sign PACKAGE")
        return trust.verify(
            package,
            own.state.trust_root(now_ms),
            now_ms=now_ms,
            audience=own.config.host,
            serials=own.state,
            greatest_time_ms=own.state.greatest_time_ms(),
        )


def document(answer: RunResult) -> dict[str, Any]:
    """Return the frame of the answer; ``client.run`` reads it."""
    return {"kind": "answer", **answer.to_json()}


def _roots_seconds(session: Session) -> float:
    """How long an access to root's own package may take: no other user can make it long, and it may be large."""
    return max(ROOT_SECONDS, float(session.supervisor.config.request_seconds))


def place_of(directory: int) -> str:
    """The file system of a directory, as it is named where it does not answer: the kernel's word for its path alone,
    which asks no file system."""
    return f"the file system of `{_escaped(os.readlink(f'/proc/self/fd/{directory}'))}`"


def _escaped(place: str) -> str:
    return "".join(c if c.isprintable() and c != "\\" else ascii(c)[1:-1] for c in place)


def name_of(directory: int, session: Session) -> str:
    """Where the package lies, as the kernel says it, with what is not printed escaped.

    Rule 8 takes one place for one package, and so believes this name: it is that of a place here, where the very
    directory is found again. What the kernel says of another is text that its author may have chosen (a mount
    namespace of theirs), and has their name before it, so that it is never the name of a place. The look has the
    rights of the caller and its time limit.
    """
    place = os.readlink(f"/proc/self/fd/{directory}")
    shown = _escaped(place)
    try:
        found, given = os.stat(place, follow_symlinks=False), os.fstat(directory)
    except OSError:
        return f"{session.caller.display}:{shown}"
    here = (found.st_dev, found.st_ino) == (given.st_dev, given.st_ino)
    return shown if here else f"{session.caller.display}:{shown}"

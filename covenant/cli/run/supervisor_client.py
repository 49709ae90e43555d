"""Find the supervisor for a command: yields a connection, or none, in which case the command does the work itself."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    import socket

    from covenant.cli.run.how import How
    from sandbox.serve.api.client import GivenWorkspace
    from sandbox.supervisor import Supervisor
    from sandbox.workspace.session import GivenDirectory


@contextlib.contextmanager
def supervisor() -> Iterator[socket.socket | None]:
    """Yield a connection to the supervisor of COVENANT_STATE, or of the machine; None if none listens.

    With COVENANT_SOCKET, the supervisor named there must listen.

    Raises:
        errors.ImpostorError: the listener is not root.
        errors.ServiceError: it cannot be reached.
    """
    from sandbox.serve.api import client

    named = os.environ.get("COVENANT_SOCKET")
    state, given = _state()
    with contextlib.ExitStack() as stack:
        for path in [os.path.abspath(named)] if named else client.candidates(state, given=given):
            sock = stack.enter_context(client.connected(path))
            if sock is not None:
                yield sock
                return
        if named:
            raise errors.ServiceError(
                f"no supervisor listens at `{named}`, or not for this user",
                hint="start covenant-supervisor, and name this uid in `callers` of its configuration",
                where=named,
            )
        yield None


def say_whose(state: Mapping[str, Any]) -> None:
    """Print the state and trust root of the supervisor that accepted a run."""
    if state.get("state") == "accepted":
        version = state.get("trust_root")
        trust = f"trust root version {version}" if version else "no trust root"
        whose = str(state.get("supervisor_state"))
        common.say(f"supervisor of {common.visible(whose)}, {trust}", err=True)
        _say_passed_over(whose)


def say_whose_here(home: Path, supervisor: Supervisor) -> None:
    """Print the home, state and trust root of a run in this process."""
    version = supervisor.state.root_version()
    trust = f"trust root version {version}" if version else "no trust root"
    common.say(f"home {common.visible(str(home))}, state {common.visible(str(supervisor.path))}, {trust}", err=True)
    _say_passed_over(str(supervisor.path))


def _say_passed_over(state: str) -> None:
    """Print that the installed service is not the supervisor of a run, where there is one.

    The socket is not connected to: for a unit of systemd a connection starts the service.
    """
    from sandbox.serve.api import paths

    if os.environ.get("COVENANT_SOCKET") or os.path.realpath(state) == os.path.realpath(paths.SYSTEM_STATE):
        return
    try:
        installed = stat.S_ISSOCK(os.stat(paths.SYSTEM_SOCKET).st_mode)
    except OSError:
        return
    if installed:
        named = next((one for one in ("COVENANT_STATE", "COVENANT_HOME") if os.environ.get(one)), "~/.covenant")
        common.say(
            f"note: the installed supervisor of {paths.SYSTEM_STATE} is not asked: {named} names another state",
            err=True,
        )


def open_package(path: Path) -> int:
    """Open a package as its reader does: only a directory, and no symlink. The caller closes the descriptor.

    Raises:
        errors.PackageError: Raised when it cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        reason = "it is a symlink" if os.path.islink(path) else e.strerror
        raise errors.PackageError(f"package `{path}` cannot be read: {reason}", where=str(path)) from e


@contextlib.contextmanager
def open_workspace(path: Path | None) -> Iterator[list[int]]:
    """Open the directory that becomes the workspace of a run, and the common directory of git of a linked worktree.

    Yields the descriptors in this order, and none without a path.

    Raises:
        errors.WorkspaceError: Raised when it cannot be opened.
    """
    if path is None:
        yield []
        return
    from sandbox.workspace import repository

    with contextlib.ExitStack() as stack:
        try:
            fds = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        except OSError as e:
            raise errors.WorkspaceError(
                f"the workspace `{path}` cannot be opened: {e.strerror}", hint="give a directory that exists"
            ) from e
        stack.callback(os.close, fds[0])
        common = repository.opened(fds[0])
        if common is not None:
            fds.append(common)
            stack.callback(os.close, common)
        yield fds


def say_apart(path: Path) -> None:
    """Name the parts of a workspace that are read-only: submodules and mounts."""
    from policy.workspace.changes import APART
    from sandbox.workspace import nested

    for name, kind in sorted(nested.named(path).items()):
        common.say(f"workspace: {common.visible(name)}/ is {APART[kind]}: it is read-only", err=True)


@contextlib.contextmanager
def given_workspace(how: How) -> Iterator[GivenWorkspace | None]:
    """Open the workspace of a run that a supervisor is asked for, if it has one.

    Raises:
        errors.WorkspaceError: Raised when it cannot be opened.
    """
    from sandbox.serve.api.client import GivenWorkspace

    with open_workspace(how.workspace) as fds:
        yield GivenWorkspace(tuple(fds), how.resume, how.keep_workspace) if fds else None


@contextlib.contextmanager
def given_here(how: How) -> Iterator[GivenDirectory | None]:
    """Open the directory that becomes the workspace of a run. Root gives its owner's rights, not its own."""
    if how.workspace is None:
        yield None
        return
    from sandbox.workspace import caller
    from sandbox.workspace.session import GivenDirectory

    with open_workspace(how.workspace) as fds:
        info = os.fstat(fds[0])
        who, beside = caller.of(info.st_uid, info.st_gid), fds[1] if len(fds) > 1 else -1
        yield GivenDirectory(fds[0], who, how.resume, keeps=how.keep_workspace, repository=beside)


def start() -> str:
    """The hint that starts the supervisor of this command's state."""
    from sandbox.serve.api import client, paths

    state, given = _state()
    return paths.start(client.candidates(state, given=given))


def _state() -> tuple[str, bool]:
    """Return COVENANT_STATE as ``common.state``, without creating it; and True if the caller set it."""
    from sandbox.serve.api import paths

    given = paths.named_by(os.environ)
    return os.path.abspath(given or os.path.expanduser("~/.covenant/supervisor")), given is not None

"""``covenant-supervisor``: the one process with rights, as a service. Run by systemd, or by root in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from policy import errors
from sandbox import config as configuration
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.net import unix_address
from sandbox.kernel.proc import hugepages
from sandbox.serve import filter_reader, hardening, metrics_worker, preload, systemd
from sandbox.serve.api import paths
from sandbox.serve.server import Server, check_callers
from sandbox.supervisor import Supervisor

_LOCK = "supervisor.lock"
_BACKLOG = 512


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; the exit status."""
    parser = argparse.ArgumentParser(prog="covenant-supervisor", description="Run signed agents for those who may ask.")
    parser.add_argument("--state", default=paths.SYSTEM_STATE, metavar="DIRECTORY", help="COVENANT_STATE")
    given = parser.parse_args(arguments)
    try:
        serve(Path(given.state))
    except errors.CovenantError as e:
        for one in errors.each(e):
            sys.stderr.write(f"covenant-supervisor: {one} [{one.code}]\n")
            if one.hint:
                sys.stderr.write(f"  fix: {one.hint}\n")
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def serve(state: Path) -> None:
    """Hold ``state``, listen, and give up what is not needed for that.

    Raises:
        errors.CovenantError: another does already, the state or the socket cannot be used, or a process ended that the
            service cannot be without.
    """
    if not state.is_absolute():
        raise errors.HomeError(f"`{state}` is not an absolute path")
    if not os.path.lexists(state):
        raise errors.HomeError(
            f"there is no directory `{state}`",
            hint=f"install -d -m 0700 {state}, or name another: covenant-supervisor --state "
            + shlex.quote(paths.named_by(os.environ) or "DIRECTORY"),
            where=str(state),
        )
    with contextlib.ExitStack() as stack:
        # A unit's cgroup is found, or asked of systemd, once, and every process of ours is below it.
        cgroup.Hierarchies.read()
        # INVARIANT: before anything is opened: it has no lock, no key and no listening socket of ours, and no filter.
        reads = stack.enter_context(filter_reader.forked())
        if filter_reader.sees_nothing():
            systemd.tell("it was started under a filter: those of gVisor can be counted, and not compared")
        # A home that holds the state decides as well (covenant.cli.common).
        hidden = (str(state.parent),) if state.name == "supervisor" else ()
        supervisor = stack.enter_context(Supervisor(state, never_granted=hidden))
        supervisor.keeps_standby = True
        check_callers(supervisor.config)
        stack.enter_context(only_one(state))
        supervisor.serves()
        listener, given = stack.enter_context(listening(supervisor))
        numbers = stack.enter_context(metrics_worker.listening(supervisor.config))
        preload.up(supervisor)
        network = hardening.apply()
        # What is there now is shared with every shim, and no collection writes to it.
        gc.collect()
        gc.disable()
        gc.freeze()
        hugepages.collapse()
        version = supervisor.state.root_version()
        root = f"trust root version {version}" if version else "no trust root"
        sys.stderr.write(f"covenant-supervisor: serves {state} ({root})\n")
        Server(supervisor, listener, network, numbers, goes_on=given, reader=reads.pidfd).serve()


@contextlib.contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Hold the lock of this state while the block lasts. Its holder serves the state.

    Raises:
        errors.AlreadyServedError: another process holds the lock.
    """
    fd = os.open(state / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.AlreadyServedError(f"another supervisor serves `{state}`", where=str(state)) from None
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def listening(supervisor: Supervisor) -> Iterator[tuple[socket.socket, bool]]:
    """The socket that systemd gave, or one of our own, which goes with us; and whether it was given.

    Raises:
        errors.ConfigError: the place is not one where only root could have put it.
    """
    try:
        given = systemd.listener()
    except ValueError as e:
        raise errors.ConfigError(f"the socket of the unit cannot be used: {e}") from e
    if given is not None:
        with given:
            yield given, True
        return
    place = supervisor.config.socket or Path(paths.socket_of(str(supervisor.path)))
    # Below /run the directory goes with each boot.
    if place == Path(paths.SYSTEM_SOCKET):
        place.parent.mkdir(mode=0o755, exist_ok=True)
    directory = _roots_own(place.parent)
    if supervisor.config.callers and (closed := _closed_to_callers(place)):
        systemd.tell(
            f"callers cannot reach `{place}`: `{closed}` is root's alone; "
            f'in {configuration.file_of(supervisor.path)}, name another place, such as socket = "{paths.SYSTEM_SOCKET}"'
        )
    try:
        # Through the descriptor that was looked at, not the path once more.
        address = unix_address.through(directory, place.name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            _remove_stale(directory, place)
            before = os.umask(0o177)
            try:
                sock.bind(address)
            finally:
                os.umask(before)
            # Who may ask is decided by SO_PEERCRED; the mode only keeps the rest from waiting in the queue.
            os.chmod(address, 0o666 if supervisor.config.callers else 0o600)
            sock.listen(_BACKLOG)
            own = os.stat(place.name, dir_fd=directory, follow_symlinks=False)
            yield sock, False
            with contextlib.suppress(FileNotFoundError):
                now = os.stat(place.name, dir_fd=directory, follow_symlinks=False)
                if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
                    os.unlink(place.name, dir_fd=directory)
    except OSError as e:
        raise errors.ConfigError(f"the socket `{place}` cannot be made: {e.strerror}", where=str(place)) from e
    finally:
        os.close(directory)


def _closed_to_callers(place: Path) -> Path | None:
    """Return the outermost directory above the socket that no caller can enter; None where there is none.

    A directory with a group may be open to a caller by that group.
    """
    return next((path for path in reversed(place.parents) if not path.stat().st_mode & 0o011), None)


def _roots_own(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise errors.ConfigError(f"the socket's directory: {e.strerror}", where=str(path)) from e
    info = os.fstat(fd)
    if info.st_uid != 0 or info.st_mode & 0o022:
        os.close(fd)
        raise errors.ConfigError(
            f"others than root can write to `{path}`", hint="put the socket where only root can", where=str(path)
        )
    return fd


def _remove_stale(directory: int, place: Path) -> None:
    """Remove the socket of a killed supervisor. No process listens there, since this one holds the lock."""
    try:
        info = os.stat(place.name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise errors.ConfigError(f"`{place}` is there and is no socket", where=str(place))
    os.unlink(place.name, dir_fd=directory)

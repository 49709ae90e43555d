"""Places of published ports: whose they are, what is refused, and that none is left."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel import libc
from sandbox.network.gate import process as gate_process
from sandbox.network.publish import gate, places

USER, OTHER = 1234, 4321


@contextlib.contextmanager
def rights_of(uid: int) -> Iterator[None]:
    libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(0)


def rights() -> contextlib.AbstractContextManager[None]:
    return rights_of(USER)


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory of USER, below one that all may pass."""
    with tempfile.TemporaryDirectory(prefix="publish-") as top:
        os.chmod(top, 0o755)
        made = Path(top) / "own"
        made.mkdir(mode=0o700)
        os.chown(made, USER, USER)
        yield made


def ask(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path))


@pytest.mark.parametrize("by_root", [False, True])
def test_socket_is_the_owner_s_alone(own: Path, by_root: bool) -> None:
    path = own / "a.sock"
    with places.opened(f"unix:{path}", rights=contextlib.nullcontext if by_root else rights) as listener:
        info = path.lstat()
        assert (stat.S_ISSOCK(info.st_mode), stat.S_IMODE(info.st_mode), info.st_uid) == (True, 0o600, USER)
        assert ask(path) == 0
        taken, _ = listener.accept()
        taken.close()
    assert list(own.iterdir()) == []


def refused(place: str | Path, message: str, fix: str) -> None:
    opened = places.opened(place if isinstance(place, str) else f"unix:{place}", rights=rights, where="publish[0].to")
    with pytest.raises(errors.PublishError, match=message) as refusal, opened:
        pass
    assert (fix in refusal.value.hint, refusal.value.where) == (True, "publish[0].to")


def test_directory_of_another_is_refused(own: Path) -> None:
    own.chmod(0o755)
    os.chown(own, OTHER, OTHER)
    refused(own / "a.sock", f"belongs to another user than uid {USER}", "the caller's own")
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_directory_that_others_write_is_refused(own: Path, mode: int) -> None:
    own.chmod(mode)
    refused(own / "a.sock", "others can write there", f"chmod go-w {own}")
    own.chmod(0o755)
    with places.opened(f"unix:{own}/a.sock", rights=rights):
        assert ask(own / "a.sock") == 0


def test_sticky_directory_is_left_as_it_is(own: Path) -> None:
    """Such as /tmp: the fix is a directory in it."""
    own.chmod(0o1777)
    refused(own / "a.sock", "others can write there", f"mkdir -m 700 {own}/NAME, and publish in it")
    (own / "NAME").mkdir(mode=0o700)
    os.chown(own / "NAME", USER, USER)
    with places.opened(f"unix:{own}/NAME/a.sock", rights=rights):
        assert ask(own / "NAME" / "a.sock") == 0


def test_link_is_not_followed(own: Path) -> None:
    elsewhere = own / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, USER, USER)
    (own / "link").symlink_to(elsewhere)
    refused(own / "link/a.sock", "symbolic links", "no link is followed")
    (own / "a.sock").symlink_to(elsewhere / "b.sock")
    refused(own / "a.sock", "in use", "remove what is there")
    assert list(elsewhere.iterdir()) == []


def test_missing_directory_names_its_making(own: Path) -> None:
    refused(own / "none/a.sock", "No such file", f"mkdir -m 700 {own}/none")


def test_file_that_is_there_stays(own: Path) -> None:
    (own / "a.sock").write_text("mine")
    refused(own / "a.sock", "in use", "remove what is there")
    assert (own / "a.sock").read_text() == "mine"


def test_socket_with_a_listener_stays(own: Path) -> None:
    path = own / "a.sock"
    with places.opened(f"unix:{path}", rights=rights):
        refused(path, "in use", "name another path")
        assert ask(path) == 0


def test_socket_of_killed_run_is_replaced(own: Path) -> None:
    path = own / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    os.chown(path, USER, USER)
    with places.opened(f"unix:{path}", rights=rights):
        assert ask(path) == 0


def test_file_of_another_maker_is_not_removed(own: Path) -> None:
    path = own / "a.sock"
    with places.opened(f"unix:{path}", rights=rights):
        path.unlink()
        path.write_text("theirs")
    assert path.read_text() == "theirs"


def test_recovery_removes_what_is_left(own: Path) -> None:
    dead, live, foreign = own / "dead.sock", own / "live.sock", own / "foreign.sock"
    for path, uid in ((dead, USER), (foreign, OTHER)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(path))
        os.chown(path, uid, uid)
    (own / "file").write_text("")
    with places.opened(f"unix:{live}", rights=rights):
        every = [f"unix:{own}/{name}" for name in ("dead.sock", "live.sock", "foreign.sock", "file", "none")]
        places.recover([*every, "127.0.0.1:18080", f"unix:{own}/none/a"])
        assert sorted(path.name for path in own.iterdir()) == ["file", "foreign.sock", "live.sock"]


def test_gate_with_sockets_of_host_cannot_connect() -> None:
    """connect(2) with AF_UNSPEC undoes a listener, and the next one leads anywhere on this host."""
    assert not {"bind", "connect", "listen", "sendmsg", "socket"} & (gate_process.CALLS | gate.CALLS)
    assert {"connect", "socket"} <= gate.CONNECTOR_CALLS
    assert gate.KIND.own_network

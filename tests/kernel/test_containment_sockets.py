"""A unix socket in a granted directory is a way to another process, and a read grant is none to talk to it.

The control connects from a plain sandbox whose runsc lets it: the same socket, the same mount, the same code.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import plain_runsc
from tests.kernel.world import World

# Every way in: as a stream, as datagrams, by a descriptor of the directory, by a link, and as a file.
CODE = """
import os, socket
AT = "/srv/sockets/"
def tried(act):
    try: return str(act())
    except OSError as e: return "errno %d" % e.errno
def connected(kind, name):
    with socket.socket(socket.AF_UNIX, kind) as s:
        s.settimeout(5)
        s.connect(name)
        if kind == socket.SOCK_DGRAM:
            return "sent %d" % s.send(b"hello")
        return s.recv(16).decode()
def by_descriptor():
    there = os.open(AT, os.O_PATH | os.O_DIRECTORY)
    return connected(socket.SOCK_STREAM, "/proc/self/fd/%d/stream" % there)
def by_link():
    os.symlink(AT + "stream", "/tmp/link")
    return connected(socket.SOCK_STREAM, "/tmp/link")
answer = {
    "listed": tried(lambda: sorted(os.listdir(AT))),
    "stream": tried(lambda: connected(socket.SOCK_STREAM, AT + "stream")),
    "datagram": tried(lambda: connected(socket.SOCK_DGRAM, AT + "datagram")),
    "descriptor": tried(by_descriptor),
    "link": tried(by_link),
    "open": tried(lambda: os.close(os.open(AT + "stream", os.O_RDWR))),
}
"""


@pytest.fixture
def granted() -> Iterator[Path]:
    """A directory with sockets that answer, which root alone can change: what pytest makes lies below one of others."""
    path = Path(f"/srv/covenant-sockets-{os.getpid()}")
    path.mkdir(mode=0o755)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with stream, datagram:
        for name, one in (("stream", stream), ("datagram", datagram)):
            one.bind(str(path / name))
            (path / name).chmod(0o777)
        stream.listen()
        thread = threading.Thread(target=_answer, args=(stream,), daemon=True)
        thread.start()
        datagram.setblocking(False)
        try:
            yield path
        finally:
            stream.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            shutil.rmtree(path)


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"reached")


def test_read_grant_opens_no_socket_that_lies_there(world: World, granted: Path) -> None:
    control = plain_runsc.run(
        ["/usr/bin/python3", "-c", CODE + "import json; print(json.dumps(answer))"],
        mounts=[plain_runsc.Mount("/srv/sockets", granted)],
        host_uds="open",
    )
    assert control.status == 0, control.stderr
    reached = json.loads(control.stdout)
    assert {reached[way] for way in ("stream", "descriptor", "link")} == {"reached"}
    assert reached["datagram"] == "sent 5"

    grant = f'[permissions.filesystem]\nread = ["{granted}"]\n'
    denied = world.ask(CODE.replace("/srv/sockets/", f"{granted}/"), more=grant)
    assert denied["listed"] == reached["listed"]
    for way in ("stream", "datagram", "descriptor", "link", "open"):
        assert denied[way].startswith("errno "), (way, denied)

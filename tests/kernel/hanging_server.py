"""A FUSE server that answers until a command stops it: run as a program by ``hanging_files``, over raw /dev/fuse.

    hanging_server.py SOURCE MOUNTPOINT UID     serve a copy of SOURCE, read once, whose files all belong to UID

Commands, one a line on stdin: ``hang OPERATION...`` (names in ``_OPERATIONS``), ``deaf`` (read no more requests),
``answer`` (answer hanging and later requests). Each is acknowledged by ``ok``. A request that is read and not answered
is reported as ``hung OPERATION``. ``end``, or the end of stdin, unmounts and ends the connection (fuse(4)).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import sys

_OPERATIONS = {
    1: "LOOKUP", 3: "GETATTR", 14: "OPEN", 15: "READ", 17: "STATFS", 18: "RELEASE", 22: "GETXATTR", 23: "LISTXATTR",
    25: "FLUSH", 26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR", 34: "ACCESS",
}  # fmt: skip
# FORGET, INTERRUPT and BATCH_FORGET have no answer (linux/fuse.h).
_SILENT = frozenset({2, 36, 42})
_IN = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
_ENTRY, _VALID = struct.Struct("=4Q2I"), struct.Struct("=Q2I")
_OPENED = struct.Struct("=QIi")
_READ = struct.Struct("=QQI")
_DIRENT = struct.Struct("=QQII")
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Node:
    """A file or directory as it was when the server started."""

    def __init__(self, path: str) -> None:
        info = os.lstat(path)
        self.mode, self.data, self.names = info.st_mode, b"", {}
        if stat.S_ISDIR(info.st_mode):
            self.names = {name: Node(os.path.join(path, name)) for name in sorted(os.listdir(path))}
        else:
            with open(path, "rb") as file:
                self.data = file.read()


class Server:
    """One connection."""

    def __init__(self, fd: int, root: Node, uid: int) -> None:
        self.fd, self.uid = fd, uid
        self.nodes: dict[int, Node] = {}
        self.numbers: dict[int, int] = {}
        self._number(root)
        self.hangs: set[str] = set()
        self.deaf = False
        self.hung: list[bytes] = []

    def _number(self, node: Node) -> None:
        number = len(self.nodes) + 1
        self.nodes[number], self.numbers[id(node)] = node, number
        for below in node.names.values():
            self._number(below)

    def command(self, words: list[str]) -> None:
        """One line of stdin."""
        if words[0] == "hang":
            self.hangs.update(words[1:])
        elif words[0] == "deaf":
            self.deaf = True
        else:
            self.hangs.clear()
            self.deaf, hung, self.hung = False, self.hung, []
            for raw in hung:
                self._answer(raw)

    def request(self) -> None:
        """Read one, and answer it unless it is to hang."""
        try:
            raw = os.read(self.fd, 1 << 18)
        except OSError as e:
            if e.errno in {errno.ENOENT, errno.EINTR, errno.EAGAIN}:
                return  # it was interrupted before it was read
            raise
        name = _OPERATIONS.get(_IN.unpack_from(raw)[1], "")
        if name in self.hangs:
            self.hung.append(raw)
            print("hung", name, flush=True)
        else:
            self._answer(raw)

    def _answer(self, raw: bytes) -> None:
        _, operation, unique, number, *_ = _IN.unpack_from(raw)
        if operation in _SILENT:
            return
        try:
            body, error = self._done(_OPERATIONS.get(operation, ""), self.nodes.get(number), raw[_IN.size :]), 0
        except OSError as e:
            body, error = b"", -(e.errno or errno.EIO)
        try:
            os.write(self.fd, _OUT.pack(_OUT.size + len(body), error, unique) + body)
        except OSError as e:
            if e.errno != errno.ENOENT:  # the client was killed meanwhile
                raise

    def _done(self, name: str, node: Node | None, rest: bytes) -> bytes:
        if name == "INIT":
            return struct.pack("=4I2H2I2H2I", 7, 31, 0, 0, 16, 12, 4096, 1, 1, 0, 0, 0).ljust(64, b"\0")
        if node is None:
            raise OSError(errno.ENOENT, "")
        if name == "LOOKUP":
            below = node.names.get(rest.rstrip(b"\0").decode())
            if below is None:
                raise OSError(errno.ENOENT, "")
            return _ENTRY.pack(self.numbers[id(below)], 0, 0, 0, 0, 0) + self._attributes(below)
        if name == "GETATTR":
            return _VALID.pack(0, 0, 0) + self._attributes(node)
        if name in {"OPEN", "OPENDIR"}:
            return _OPENED.pack(0, 1, 0)  # FOPEN_DIRECT_IO: each read is asked
        if name == "READ":
            _, offset, size = _READ.unpack_from(rest)
            return node.data[offset : offset + size]
        if name == "READDIR":
            _, offset, _ = _READ.unpack_from(rest)
            return b"" if offset else self._entries(node)
        if name == "STATFS":
            return struct.pack("=5Q4I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0).ljust(
                80, b"\0"
            )
        if name in {"RELEASE", "RELEASEDIR", "FLUSH", "ACCESS"}:
            return b""
        raise OSError(errno.ENOSYS, "")

    def _attributes(self, node: Node) -> bytes:
        number, size = self.numbers[id(node)], len(node.data)
        times = (1_700_000_000,) * 3
        return _ATTR.pack(
            number, size, (size + 511) // 512, *times, 0, 0, 0, node.mode, 1, self.uid, self.uid, 0, 4096, 0
        )  # fmt: skip

    def _entries(self, node: Node) -> bytes:
        out = b""
        for at, (name, below) in enumerate(node.names.items(), 1):
            encoded = name.encode()
            entry = _DIRENT.pack(self.numbers[id(below)], at, len(encoded), stat.S_IFMT(below.mode) >> 12) + encoded
            out += entry + b"\0" * (-len(entry) % 8)
        return out


def main(source: str, mountpoint: str, uid: str) -> None:
    """Mount, say ``ready``, and serve until stdin ends."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    server = Server(fd, Node(source), int(uid))
    data = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"hanging", mountpoint.encode(), b"fuse", 6, data):  # nosuid, nodev
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        server.request()  # INIT
        print("ready", flush=True)
        pending = b""
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            if not server.deaf:
                poll.register(fd, select.POLLIN)
            ready = dict(poll.poll())
            if 0 in ready:
                if not (piece := os.read(0, 4096)):
                    return
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    if line == b"end":
                        return
                    server.command(line.decode().split())
                    print("ok", flush=True)
            elif fd in ready:
                server.request()
    finally:
        _libc.umount2(mountpoint.encode(), _MNT_DETACH)
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A probe of an agent's rights in its unit: every attempt with its outcome, as one line of JSON.

Run by systemd alone.
"""

import ctypes
import errno
import functools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

sys.stdin.readline()
LIBC = ctypes.CDLL(None, use_errno=True)
FOUND: dict[str, Any] = {}


def name_of(number: int | None) -> str:
    return errno.errorcode[number or 0]


def note(name: str, attempt: Callable[[], Any]) -> None:
    try:
        FOUND[name] = attempt()
    except OSError as e:
        FOUND[name] = name_of(e.errno)


def text(path: str) -> str:
    with open(path) as stream:
        return stream.read()


def call(number: int, *arguments: int) -> str:
    ctypes.set_errno(0)
    result = LIBC.syscall(number, *[ctypes.c_long(a) for a in arguments])
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]


def start(path: str, *arguments: str) -> str | int:
    """How a child that runs `path` ends: its status, or the error of execve."""
    child = os.fork()
    if not child:
        try:
            os.execv(path, [path, *arguments])
        except OSError as e:
            os._exit(100 + (e.errno or 0))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # 127 is what the dynamic linker ends with, which is no error of execve.
    return errno.errorcode[status - 100] if 100 < status < 127 else status


def writable() -> list[str]:
    found = []
    for directory, below, files in os.walk("/"):
        if directory == "/proc":
            below[:] = []
            continue
        if os.access(directory, os.W_OK):
            found.append(directory)
        found += [p for f in files if os.path.isfile(p := os.path.join(directory, f)) and os.access(p, os.W_OK)]
    return found


def fill() -> list[Any]:
    """MiB that fit into /tmp, each in a file of its own."""
    names: list[str] = []
    error = None
    try:
        while len(names) < 64:
            names.append(f"/tmp/{len(names)}")
            with open(names[-1], "wb") as stream:
                stream.write(b"x" * 1048576)
    except OSError as e:
        error = name_of(e.errno)
    for name in names:
        os.unlink(name)
    return [len(names) - 1, error]


def copied() -> list[Any]:
    with open("/usr/bin/python3", "rb") as source, open("/tmp/copy", "wb") as copy:
        copy.write(source.read(4096))
    os.chmod("/tmp/copy", 0o700)
    return [start("/tmp/copy"), start(LINKER, "/tmp/copy")]


def thread() -> str:
    done: list[str] = []
    one = threading.Thread(target=lambda: done.append("done"))
    one.start()
    one.join()
    return done[0]


def children() -> list[Any]:
    """The most that were ever alive: a thread that has been joined may still be on its way out, and counts so long."""
    tried = []
    for _ in range(5):
        tried.append(_children())
        time.sleep(0.05)
    return max(tried)


def _children() -> list[Any]:
    count, error = 0, None
    running: list[int] = []
    hold, release = os.pipe()
    try:
        while count < 64:
            child = os.fork()
            if not child:
                os.close(release)
                os.read(hold, 1)
                os._exit(0)
            running.append(child)
            count += 1
    except OSError as e:
        error = name_of(e.errno)
    os.close(release)
    for child in running:
        os.waitpid(child, 0)
    return [count, error]


def family(name: str, kind: socket.SocketKind) -> str:
    with socket.socket(getattr(socket, name), kind):
        return "done"


MACHINE = os.uname().machine
NUMBERS = {
    "x86_64": {
        "clone": 56,
        "clone3": 435,
        "unshare": 272,
        "memfd_create": 319,
        "mount": 165,
        "bpf": 321,
        "ptrace": 101,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "unshare": 97,
        "memfd_create": 279,
        "mount": 40,
        "bpf": 280,
        "ptrace": 117,
    },
}[MACHINE]
LINKER = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[MACHINE]
NEWUSER, SIGCHLD = 0x10000000, 17

note("root", lambda: sorted(os.listdir("/")))
note("usr_bin", lambda: sorted(os.listdir("/usr/bin")))
note("etc", lambda: os.listdir("/etc"))
note("shm", lambda: os.listdir("/dev/shm"))
note("sys", lambda: os.listdir("/sys"))
note("proc", lambda: sorted(p for p in os.listdir("/proc") if not p.isdigit()))
note("processes", lambda: len([p for p in os.listdir("/proc") if p.isdigit()]))
note("shadow", lambda: len(text("/etc/shadow")))
note("granted", lambda: len(os.listdir("/usr/share/doc")) > 0)
note("granted_below", lambda: os.listdir("/usr/share/doc/below"))
note("granted_fifo", lambda: os.close(os.open("/usr/share/doc/fifo", os.O_WRONLY | os.O_NONBLOCK)))
note("granted_write", lambda: open("/usr/share/doc/x", "w").close())
note("package", lambda: sorted(os.listdir(".")))
note("writable", writable)
note("fill", fill)
note("ids", lambda: [os.getuid(), os.getgid(), os.getgroups()])
STATUS = dict(line.split(":", 1) for line in text("/proc/self/status").splitlines())
KEPT = ("CapEff", "CapBnd", "CapPrm", "CapAmb", "NoNewPrivs", "Seccomp")
note("status", lambda: {key: STATUS[key].strip() for key in KEPT})
note("start_shell", lambda: start("/bin/sh", "-c", "exit 0"))
note("start_itself", lambda: start("/usr/bin/python3", "-c", "pass"))
note("start_copy", copied)
note("thread", thread)
for name, arguments in {
    "clone": (NEWUSER | SIGCHLD, 0, 0, 0, 0),
    "clone3": (0, 0),
    "unshare": (NEWUSER,),
    "memfd_create": (0, 0),
    "mount": (0, 0, 0, 0, 0),
    "bpf": (0, 0, 0),
    "ptrace": (0, 0, 0, 0),
}.items():
    note(name, functools.partial(call, NUMBERS[name], *arguments))
for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET"):
    kind = socket.SOCK_RAW if name in ("AF_NETLINK", "AF_PACKET") else socket.SOCK_STREAM
    note(name, functools.partial(family, name, kind))
note("children", children)
note("environment", lambda: sorted(os.environ))
note("limits", lambda: {n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}"))[1] for n in ("NPROC", "FSIZE", "CORE")})
sys.stdout.write(json.dumps(FOUND) + "\n")

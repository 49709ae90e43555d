"""Our filters in the host's own kernel, in a child that makes harmless calls alone.

The errno of each call before and after loading tells what the filter did.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

CHILD = """
import ctypes, json, os, socket, subprocess, sys, threading
sys.path.insert(0, sys.argv[1])
order = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)

def errnos():
    found = {}
    for name, (number, *arguments) in order["calls"].items():
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(a) for a in arguments))
        found[name] = ctypes.get_errno() if result == -1 else 0
    return found

def load_bpf():
    raw = bytes.fromhex(order["bpf"])
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))
    program = Program(len(raw) // 8, raw)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, ctypes.byref(program), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "the kernel refused the filter")

def load_denylist():
    from policy import data
    from policy.compile import seccomp
    from sandbox.kernel.seccomp import load as seccomp_loader
    seccomp_loader.load(seccomp.compile_denylist(data.deny().names, arch=os.uname().machine,
                                                 network=False))

def attempt(act):
    try:
        act()
        return "works"
    except OSError as error:
        return error.errno

def thread():
    worker = threading.Thread(target=int)
    worker.start()
    worker.join()

before = errnos()
(load_bpf if order["bpf"] else load_denylist)()
status = open("/proc/self/status").read().split()
print(json.dumps({
    "before": before,
    "after": errnos(),
    "seccomp": status[status.index("Seccomp:") + 1],
    "no_new_privs": status[status.index("NoNewPrivs:") + 1],
    "thread": attempt(thread),
    "program": attempt(lambda: subprocess.run(["/usr/bin/true"], check=True)),
    "inet": attempt(lambda: socket.socket(socket.AF_INET).close()),
    "packet": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()),
    "unix": attempt(lambda: [s.close() for s in socket.socketpair()]),
}))
"""


def in_a_child(calls: dict[str, list[int]], *, bpf: bytes = b"") -> dict[str, Any]:
    """Load `bpf`, or else the deny list of trusted-local, into a child, and make `calls` before and after.

    Each call is its number and arguments, and must be harmless even before.
    """
    order = json.dumps({"calls": calls, "bpf": bpf.hex()})
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT)], input=order, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# linux/ptrace.h
_PTRACE_ATTACH, _PTRACE_DETACH, _PTRACE_SECCOMP_GET_FILTER = 16, 17, 0x420C


def loaded_filter(pid: int) -> bytes:
    """The newest seccomp filter of a child of ours, as its kernel holds it (CONFIG_CHECKPOINT_RESTORE)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ptrace(request: int, address: int = 0, data: object = None) -> int:
        result: int = libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), ctypes.c_void_p(address), data)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    ptrace(_PTRACE_ATTACH)
    try:
        os.waitpid(pid, 0)
        count = ptrace(_PTRACE_SECCOMP_GET_FILTER)
        buffer = ctypes.create_string_buffer(count * 8)
        ptrace(_PTRACE_SECCOMP_GET_FILTER, 0, buffer)
    finally:
        ptrace(_PTRACE_DETACH)
    return buffer.raw


def end(pid: int) -> None:
    """Kill and reap a child of ours."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

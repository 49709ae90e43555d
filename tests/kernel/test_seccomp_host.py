"""Both filters in the host's own kernel, in a child that makes harmless calls alone.

Every argument is one that makes the call fail without effect, so that even a filter that does nothing changes
nothing on this machine; the errno before and after loading tells the two apart.
"""

from __future__ import annotations

import errno
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policy import data
from policy.compile import seccomp

ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
ROOT = Path(__file__).parents[2]
BAD = 0xFFFFFFFFFFFFFFFF
X32 = 0x40000000

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
    from sandbox.kernel import seccomp_loader
    seccomp_loader.load(seccomp.compile_denylist(data.deny().names, arch=os.uname().machine,
                                                 deny_socket_families_except={socket.AF_UNIX}))

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
    order = json.dumps({"calls": calls, "bpf": bpf.hex()})
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT)], input=order, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def harmless(*names: str) -> dict[str, list[int]]:
    """Calls that fail without effect: null pointers, descriptors and commands that do not exist."""
    arguments = {"uname": [0], "memfd_create": [0, BAD], "execveat": [BAD, 0, 0, 0, BAD], "unshare": [1],
                 "keyctl": [9999, 0], "bpf": [9999, 0, 0], "io_uring_setup": [0, 0], "swapoff": [0],
                 "setns": [BAD, 0], "umount2": [0, 0], "init_module": [0, 0, 0], "ptrace": [9999, 0, 0, 0],
                 "getppid": [], "getpid": [], "clone3": [0, 0], "clock_settime": [9999, 0]}  # fmt: skip
    return {name: [NUMBERS[name], *arguments[name]] for name in names}


def test_the_emitted_bpf_loads_and_holds() -> None:
    names = data.profile("python3").names - {"uname"} | {"execve", "vfork"}
    calls = harmless("uname", "getppid", "clone3", "memfd_create", "execveat", "unshare", "bpf", "keyctl")
    answer = in_a_child(calls, bpf=seccomp.compile(names, arch=ARCH).bpf)
    assert (answer["seccomp"], answer["no_new_privs"]) == ("2", "1")
    assert answer["before"]["uname"] == errno.EFAULT
    assert answer["after"]["getppid"] == 0
    for name in ("uname", "memfd_create", "execveat", "unshare", "bpf", "keyctl"):
        assert answer["before"][name] not in (0, errno.EPERM), name
        assert answer["after"][name] == errno.EPERM, name
    assert (answer["before"]["clone3"], answer["after"]["clone3"]) == (errno.EINVAL, errno.ENOSYS)
    assert (answer["thread"], answer["program"], answer["unix"]) == ("works", "works", "works")
    assert (answer["inet"], answer["packet"]) == (errno.EPERM, errno.EPERM)


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("profile", ["python3", "node", "static"])
def test_the_kernel_takes_every_profile(arch: str, profile: str) -> None:
    # Loading checks the program (jumps, length, last instruction) whatever it allows; the other architecture's
    # filter then refuses even the exit, so it is loaded where nothing has to work afterwards.
    program = seccomp.compile(data.profile(profile).names, arch=arch).bpf
    script = CHILD.split("before = errnos()", maxsplit=1)[0] + "load_bpf()\nlibc.getppid()\n"
    script += "import ctypes; ctypes.string_at(0)\n"  # end by a signal, since exit_group may be refused
    order = json.dumps({"calls": {}, "bpf": program.hex()})
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)], input=order, capture_output=True, text=True, timeout=60
    )
    assert "refused the filter" not in done.stderr
    assert done.returncode == -11


def test_an_x32_call_is_refused() -> None:
    # On aarch64 it is a number that no call has; it must be refused by the filter all the same.
    calls = {"x32 getpid": [X32 + NUMBERS["getpid"]], "getpid": [NUMBERS["getpid"]]}
    for bpf in (b"", seccomp.compile(data.profile("python3").names, arch=ARCH).bpf):
        answer = in_a_child(calls, bpf=bpf)
        assert answer["before"]["x32 getpid"] != errno.EPERM
        assert answer["after"] == {"x32 getpid": errno.EPERM, "getpid": 0}


def test_the_deny_list_loads_and_holds() -> None:
    refused = ("memfd_create", "execveat", "unshare", "keyctl", "bpf", "io_uring_setup", "swapoff", "setns",
               "umount2", "init_module", "ptrace", "clock_settime")  # fmt: skip
    answer = in_a_child(harmless(*refused, "getpid", "uname", "clone3"))
    assert (answer["seccomp"], answer["no_new_privs"]) == ("2", "1")
    assert {answer["after"][name] for name in refused} == {errno.EPERM}
    assert all(answer["before"][name] not in (0, errno.EPERM) for name in refused)
    assert (answer["after"]["getpid"], answer["after"]["uname"]) == (0, errno.EFAULT)
    assert answer["after"]["clone3"] == errno.ENOSYS
    assert (answer["thread"], answer["program"], answer["unix"]) == ("works", "works", "works")
    assert (answer["inet"], answer["packet"]) == (errno.EPERM, errno.EPERM)

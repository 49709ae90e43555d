"""The rights that the supervisor drops are really gone.

Each is tried as root in a separate process, before and after.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.kernel.world import ROOT

# Each is harmless where it is allowed: it fails for its arguments, or makes something that goes with the process.
_PROBES = """
import ctypes, errno, json, os, socket, sys
sys.path.insert(0, sys.argv[1])
from policy import data
from sandbox.kernel import libc
from sandbox.serve import hardening

numbers = data.syscalls(os.uname().machine).numbers
raw = ctypes.CDLL(None, use_errno=True).syscall


def call(name, *arguments):
    ctypes.set_errno(0)
    got = raw(ctypes.c_long(numbers[name]), *(ctypes.c_long(one) for one in arguments))
    if got >= 0 and name in ("userfaultfd", "perf_event_open", "io_uring_setup", "fanotify_init"):
        os.close(got)
    return "done" if got >= 0 else errno.errorcode[ctypes.get_errno()]


def act(look):
    try:
        look()
    except OSError as e:
        return errno.errorcode[e.errno]
    return "done"


def device():
    os.mknod(sys.argv[2] + "/node", 0o20600, os.makedev(1, 3))
    os.unlink(sys.argv[2] + "/node")


def tried():
    query = ctypes.create_string_buffer(128)
    at = ctypes.addressof(query)
    return {
        "keyctl": call("keyctl", 0, -3, 0),
        "add_key": call("add_key", 0, 0, 0, 0, -3),
        "userfaultfd": call("userfaultfd", 0x7FFFFFFF),
        "perf_event_open": call("perf_event_open", 0, 0, -1, -1, 0),
        "io_uring_setup": call("io_uring_setup", 0, 0),
        "fanotify_init": call("fanotify_init", 0x7FFFFFFF, 0),
        "open_by_handle_at": call("open_by_handle_at", -1, 0, 0),
        "init_module": call("init_module", 0, 0, 0),
        "kexec_load": call("kexec_load", 0, 1 << 20, 0, 0),
        "swapon": call("swapon", 0, 0),
        "clock_settime": call("clock_settime", 99, 0),
        "bpf map": call("bpf", 0, at, 0),
        "bpf query": call("bpf", 16, at, 32),
        # Without the filter's help: the capability is gone.
        "sys_nice": act(lambda: os.nice(-1)),
        "mknod": act(device),
        # What it keeps, as every run needs it.
        "mount": act(lambda: libc.private_mounts()),
        "network namespace": act(lambda: libc.unshare(libc.CLONE_NEWNET)),
        "user": act(lambda: os.setresuid(0, 0, 0)),
    }


before = tried()
network = os.readlink("/proc/self/ns/net")
host = hardening.apply()
after = tried()
libc.setns(host, libc.CLONE_NEWNET)
print(json.dumps({"before": before, "after": after, "returns": os.readlink("/proc/self/ns/net") == network}))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBES, str(ROOT), str(tmp_path_factory.mktemp("node"))],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_filter_refuses_what_kernel_would_have_answered(tried: dict[str, Any]) -> None:
    calls = ("keyctl", "add_key", "userfaultfd", "perf_event_open", "io_uring_setup", "fanotify_init", "init_module",
             "open_by_handle_at", "kexec_load", "swapon", "clock_settime", "bpf map")  # fmt: skip
    assert {name: tried["after"][name] for name in calls} == dict.fromkeys(calls, "EPERM")
    # The control: most of these got as far as the arguments before. A kernel may lack one (ENOSYS).
    reached = [name for name in calls if tried["before"][name] not in ("EPERM", "ENOSYS")]
    assert len(reached) >= 8, tried["before"]


def test_what_runs_need_is_as_it_was(tried: dict[str, Any]) -> None:
    kept = ("mount", "network namespace", "user", "bpf query")
    assert {name: tried["after"][name] for name in kept} == {name: tried["before"][name] for name in kept}
    assert tried["before"]["mount"] == tried["before"]["network namespace"] == "done"
    assert tried["returns"] is True


def test_capability_that_no_run_needs_is_gone(tried: dict[str, Any]) -> None:
    assert (tried["before"]["sys_nice"], tried["after"]["sys_nice"]) == ("done", "EPERM")
    assert (tried["before"]["mknod"], tried["after"]["mknod"]) == ("done", "EPERM")

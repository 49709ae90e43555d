"""Both filters in the host's own kernel, in a child that makes harmless calls alone.

Every argument is one that makes the call fail without effect, so that even a filter that does nothing changes
nothing on this machine; the errno before and after loading tells the two apart.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys

import pytest

from policy import data
from policy.compile import seccomp
from policy.decompile import bpf
from sandbox.kernel.seccomp import load
from tests.kernel import argument_probes, host_filter

ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
BAD = 0xFFFFFFFFFFFFFFFF
X32 = 0x40000000
TAG = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[ARCH]
TERMINAL = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD


def harmless(*names: str) -> dict[str, list[int]]:
    """Calls that fail without effect: null pointers, descriptors and commands that do not exist."""
    arguments = {"uname": [0], "memfd_create": [0, BAD], "execveat": [BAD, 0, 0, 0, BAD], "unshare": [1],
                 "keyctl": [9999, 0], "bpf": [9999, 0, 0], "io_uring_setup": [0, 0], "swapoff": [0],
                 "setns": [BAD, 0], "umount2": [0, 0], "init_module": [0, 0, 0], "ptrace": [9999, 0, 0, 0],
                 "getppid": [], "getpid": [], "clone3": [0, 0], "clock_settime": [9999, 0]}  # fmt: skip
    return {name: [NUMBERS[name], *arguments[name]] for name in names}


def test_emitted_bpf_loads_and_holds() -> None:
    names = data.profile("python3").names - {"uname"} | {"execve", "vfork"}
    calls = harmless("uname", "getppid", "clone3", "memfd_create", "execveat", "unshare", "bpf", "keyctl")
    answer = host_filter.in_a_child(calls, bpf=seccomp.compile(names, arch=ARCH).bpf)
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
def test_kernel_takes_every_profile(arch: str, profile: str) -> None:
    # Loading checks the program (jumps, length, last instruction) without regard to what it allows. The other
    # architecture's filter then refuses even the exit, so it is loaded where nothing has to work afterwards.
    program = seccomp.compile(data.profile(profile).names, arch=arch).bpf
    script = host_filter.CHILD.split("before = errnos()", maxsplit=1)[0] + "load_bpf()\nlibc.getppid()\n"
    script += "import ctypes; ctypes.string_at(0)\n"  # end by a signal, since exit_group may be refused
    order = json.dumps({"calls": {}, "bpf": program.hex()})
    done = subprocess.run(
        [sys.executable, "-c", script, str(host_filter.ROOT)], input=order, capture_output=True, text=True, timeout=60
    )
    assert "refused the filter" not in done.stderr
    assert done.returncode == -11


def test_x32_call_is_refused() -> None:
    # On aarch64 it is a number that no call has; it must be refused by the filter all the same.
    calls = {"x32 getpid": [X32 + NUMBERS["getpid"]], "getpid": [NUMBERS["getpid"]]}
    for program in (b"", seccomp.compile(data.profile("python3").names, arch=ARCH).bpf):
        answer = host_filter.in_a_child(calls, bpf=program)
        assert answer["before"]["x32 getpid"] != errno.EPERM
        assert answer["after"] == {"x32 getpid": errno.EPERM, "getpid": 0}


def test_deny_list_loads_and_holds() -> None:
    refused = ("memfd_create", "execveat", "unshare", "keyctl", "bpf", "io_uring_setup", "swapoff", "setns",
               "umount2", "init_module", "ptrace", "clock_settime")  # fmt: skip
    answer = host_filter.in_a_child(harmless(*refused, "getpid", "uname", "clone3"))
    assert (answer["seccomp"], answer["no_new_privs"]) == ("2", "1")
    assert {answer["after"][name] for name in refused} == {errno.EPERM}
    assert all(answer["before"][name] not in (0, errno.EPERM) for name in refused)
    assert (answer["after"]["getpid"], answer["after"]["uname"]) == (0, errno.EFAULT)
    assert answer["after"]["clone3"] == errno.ENOSYS
    assert (answer["thread"], answer["program"], answer["unix"]) == ("works", "works", "works")
    assert (answer["inet"], answer["packet"]) == (errno.EPERM, errno.EPERM)


# --- what is exported is what is loaded -----------------------------------------------------------------

DENIED = {
    "network off": seccomp.compile_denylist(data.deny().names, arch=ARCH, network=False),
    "network free": seccomp.compile_denylist(data.deny().names, arch=ARCH, network=True),
}


@pytest.mark.parametrize("which", DENIED)
def test_kernel_holds_program_that_was_exported(which: str) -> None:
    prepared = load.prepare(DENIED[which])
    exported = load.export(prepared)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            load.enter(prepared)
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"x"
        held = host_filter.loaded_filter(pid)
    finally:
        host_filter.end(pid)
        os.close(ready)
        os.close(tell)
    assert held == exported
    # Beside the bytes, every decision that the rules' boundaries can tell apart.
    for probe in argument_probes.probes(ARCH):
        number, *arguments = probe.numbers(ARCH)
        asked = {"number": number, "arch": TAG, "arguments": arguments}
        assert bpf.decide(held, **asked) == bpf.decide(exported, **asked)  # type: ignore[arg-type]


def test_child_of_trusted_local_gets_what_exported_program_says() -> None:
    exported = load.export(load.prepare(DENIED["network off"]))
    probes = argument_probes.probes(ARCH)
    answer = host_filter.in_a_child({probe.id: probe.numbers(ARCH) for probe in probes})
    refused = set()
    for probe in probes:
        number, *arguments = probe.numbers(ARCH)
        action = bpf.decide(exported, number=number, arch=TAG, arguments=arguments)
        before, after = answer["before"][probe.id], answer["after"][probe.id]
        assert after == (before if action == bpf.ALLOW else errno.EPERM), probe.id
        if action != bpf.ALLOW:
            refused.add(probe.id)
            assert before != errno.EPERM, probe.id
    assert {name.split("(")[0] for name in refused} == {"socket", "socketpair", "ioctl", "personality"}
    # On these two rules trusted-local and gVisor agree.
    for probe in probes:
        if probe.call == "personality" or (probe.call == "ioctl" and probe.arguments[1] & 0xFFFFFFFF in TERMINAL):
            assert (probe.id in refused) == (not probe.allowed), probe.id

"""The filter under real gVisor: what runsc makes of linux.seccomp, and what the profiles let pass."""

from __future__ import annotations

import errno
import json
import platform
from pathlib import Path
from typing import Any

import pytest

from policy import data
from policy.compile import seccomp
from tests.kernel import filtered_runsc, plain_runsc

ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
WORKLOADS = Path(__file__).parent / "workloads"
AGENTS = Path(__file__).parents[2] / "agents"
NEWUSER, SIGCHLD = 0x10000000, 17
NAMESPACE_BITS = (17, 25, 26, 27, 28, 29, 30)  # CLONE_NEW* of linux/sched.h


def python_without(*names: str) -> dict[str, Any]:
    return seccomp.compile(data.profile("python3").names - set(names), arch=ARCH).oci


GETPPID = [[NUMBERS["getppid"]]]


# --- facts about runsc that the product rests on: a new runsc must not change them in silence --------


def test_runsc_ignores_filter_without_its_flag() -> None:
    filter_ = python_without("getppid")
    ignored = filtered_runsc.call(GETPPID, filter_, oci_seccomp=False)
    assert ignored == ([0], ["Seccomp:\t0"])
    enforced = filtered_runsc.call(GETPPID, filter_)
    assert enforced == ([errno.EPERM], ["Seccomp:\t2"])
    granted = filtered_runsc.call(GETPPID, python_without())
    assert granted == ([0], ["Seccomp:\t2"])


def test_runsc_ignores_errno_ret() -> None:
    filter_ = {**python_without("getppid"), "defaultErrnoRet": errno.ENOSYS}
    filter_["syscalls"].append({"names": ["getsid"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EACCES})
    filter_["syscalls"][0]["names"].remove("getsid")
    assert filtered_runsc.errnos([*GETPPID, [NUMBERS["getsid"], 0]], filter_) == [errno.EPERM, errno.EPERM]


def test_runsc_skips_name_that_it_does_not_know() -> None:
    filter_ = python_without("getppid")
    filter_["syscalls"][0]["names"].append("a_call_of_tomorrow")
    assert filtered_runsc.errnos([*GETPPID, [NUMBERS["getpid"]]], filter_) == [errno.EPERM, 0]


def test_traced_call_without_tracer_does_not_exist() -> None:
    # Without this, no thread could be started: libc falls back from clone3 on ENOSYS alone.
    clone3 = [[NUMBERS["clone3"], 0, 0]]
    assert filtered_runsc.errnos(clone3, python_without()) == [errno.ENOSYS]
    assert filtered_runsc.errnos(clone3, python_without("clone")) == [errno.EPERM]
    assert filtered_runsc.errnos(clone3, None) == [errno.EINVAL]


def test_no_thread_starts_where_clone3_is_refused_with_eperm() -> None:
    program = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
    filter_ = python_without()
    refused = {**filter_, "syscalls": [r for r in filter_["syscalls"] if r["action"] != "SCMP_ACT_TRACE"]}
    for chosen, output in ((filter_, b"ran\n"), (refused, b"")):
        done = filtered_runsc.run(["/usr/bin/python3", "-I", "-c", program], seccomp=chosen)
        assert done.stdout == output
        assert (b"can't start new thread" in done.stderr) == (not output)


@pytest.mark.parametrize(("indexes", "either_is_enough"), [((0, 0), True), ((0, 1), False)])
def test_runsc_ors_two_conditions_on_one_argument(indexes: tuple[int, int], either_is_enough: bool) -> None:
    checks = [
        {"index": index, "value": value, "op": "SCMP_CMP_EQ"} for index, value in zip(indexes, (1, 2), strict=True)
    ]
    filter_ = python_without("getppid")
    filter_["syscalls"].append({"names": ["getppid"], "action": "SCMP_ACT_ALLOW", "args": checks})
    number = NUMBERS["getppid"]
    one_holds, none_holds = filtered_runsc.errnos([[number, 1, 9], [number, 8, 9]], filter_)
    assert none_holds == errno.EPERM
    assert (one_holds == 0) == either_is_enough
    if not either_is_enough:
        assert filtered_runsc.errnos([[number, 1, 2]], filter_) == [0]


# --- our filter --------------------------------------------------------------------------------------


def test_clone_makes_no_namespace() -> None:
    # The calls come back in the caller alone: a child of clone would print the answers twice, so it is a thread-less
    # fork that python's own wait never sees; NEWUSER without the filter is the control.
    calls = [[NUMBERS["clone"], 1 << bit | SIGCHLD, 0, 0, 0, 0] for bit in NAMESPACE_BITS]
    assert filtered_runsc.errnos(calls, python_without()) == [errno.EPERM] * len(calls)
    control = filtered_runsc.run(
        ["/usr/bin/python3", "-I", "-c",
         ("import ctypes, os, sys\n"
         f"pid = ctypes.CDLL(None).syscall({NUMBERS['clone']}, {NEWUSER | SIGCHLD}, 0, 0, 0, 0)\n"
         "if pid == 0: os._exit(7)\n"
         "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid > 0 else 1)")],
        seccomp=None,
    )  # fmt: skip
    assert control.status == 7, control.stderr


@pytest.mark.parametrize("profile", ["python3", "node", "static"])
def test_every_call_outside_profile_is_refused(profile: str) -> None:
    granted = data.profile(profile).names
    # The caller itself is python, so it runs under the union; what is asked is what neither has.
    names = granted | data.profile("python3").names
    # From Linux 6.14 on no seccomp filter sees uretprobe and uprobe, neither ours nor the one by which systrap
    # catches calls: the host's kernel answers with SIGILL, since the caller is no probe's trampoline.
    unseen = {335, 336} if ARCH == "x86_64" else set()
    asked = sorted({number for name, number in NUMBERS.items() if name not in names} - unseen)
    holes = sorted(set(range(480)) - set(NUMBERS.values()))
    calls = [[number, 0, 0, 0, 0, 0, 0] for number in asked + holes]
    answers = filtered_runsc.errnos(calls, seccomp.compile(names, arch=ARCH).oci)
    refused = dict(zip(asked + holes, answers, strict=True))
    assert refused.pop(NUMBERS["clone3"]) == errno.ENOSYS
    assert len(refused) > 250
    assert {number: error for number, error in refused.items() if error != errno.EPERM} == {}


def test_denied_calls_answer_otherwise_without_filter() -> None:
    # The control of the test above, on calls that do nothing with these arguments even where they are allowed.
    bad = 0xFFFFFFFFFFFFFFFF
    harmless = {
        "memfd_create": [0, bad], "execveat": [bad, 0, 0, 0, bad], "ptrace": [99999, 0, 0, 0], "execve": [0, 0, 0],
        "unshare": [0], "socket": [999, 0, 0],
    }  # fmt: skip
    calls = [[NUMBERS[name], *arguments] for name, arguments in harmless.items()]
    assert filtered_runsc.errnos(calls, python_without()) == [errno.EPERM] * len(calls)
    assert errno.EPERM not in filtered_runsc.errnos(calls, None)


ENTRIES = """
import ctypes, json, mmap, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
def x32(number):
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(0x40000000 + number)) == -1 else 0
answers = [x32(int(n)) for n in sys.argv[1:]]
if platform.machine() == "x86_64":
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("53 89f8 cd80 5b c3"))  # push rbx; mov eax, edi; int 0x80; pop rbx; ret
    entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    answers += [-entry(int(n)) for n in (20, *sys.argv[1:])]  # 20 is getpid of i386
print(json.dumps(answers))
"""


def test_there_is_no_way_in_by_x32_or_int_0x80() -> None:
    numbers = [str(NUMBERS[name]) for name in ("getpid", "getuid", "getppid")]
    filter_ = python_without("getppid")
    for with_filter, expected in ((filter_, errno.EPERM), (None, errno.ENOSYS)):
        done = filtered_runsc.run(["/usr/bin/python3", "-I", "-c", ENTRIES, *numbers], seccomp=with_filter)
        assert done.status == 0, done.stderr
        assert set(json.loads(done.stdout)) == {expected}


def _with(addition: str) -> frozenset[str]:
    """The calls of python3, with what another grant brings."""
    return data.profile("python3").names | (data.addition(addition).names if addition else frozenset())


def test_program_starts_only_with_its_grant() -> None:
    program = "import os; os.execv('/usr/bin/echo', ['echo', 'started'])"
    for executables, expected in ((False, b""), (True, b"started\n")):
        names = _with("executables" if executables else "")
        done = filtered_runsc.run(
            ["/usr/bin/python3", "-I", "-c", program], seccomp=seccomp.compile(names, arch=ARCH).oci
        )
        assert done.stdout == expected
        assert (b"PermissionError" in done.stderr) != executables


# --- the profiles let honest work pass ----------------------------------------------------------------


def profile_filter(name: str) -> dict[str, Any]:
    return seccomp.compile(data.profile(name).names, arch=ARCH).oci


@pytest.mark.parametrize(("profile", "program", "script"), [
    ("python3", ["/usr/bin/python3", "-I", "-B"], "python3.py"),
    ("node", ["/usr/bin/node"], "node.js"),
])  # fmt: skip
def test_workload_runs_within_its_profile(profile: str, program: list[str], script: str) -> None:
    planted = {f"/{script}": (WORKLOADS / script).read_bytes()}
    done = filtered_runsc.run([*program, f"/{script}"], seccomp=profile_filter(profile), files=planted, stdin=b"line\n")
    assert (done.status, done.stdout.split()[-1:]) == (0, [b"done"]), (done.stdout + done.stderr).decode()[-3000:]


@pytest.mark.parametrize("argv", [
    ["/usr/bin/sha256sum", "/usr/bin/sort"],
    ["/usr/bin/sort", "--parallel=4", "-S1M", "/usr/share/common-licenses/GPL-3"],
    ["/usr/bin/find", "/usr/share/doc", "-maxdepth", "1"],
    ["/usr/bin/gzip", "-kc", "/usr/share/common-licenses/GPL-3"],
    ["/usr/bin/cp", "-r", "/usr/share/common-licenses", "/tmp/"],
    ["/usr/bin/runsc", "--version"],  # a program in Go
], ids=lambda argv: argv[0].rsplit("/", 1)[-1])  # fmt: skip
def test_compiled_programs_run_within_static(argv: list[str]) -> None:
    with_filter = filtered_runsc.run(argv, seccomp=profile_filter("static"))
    without = filtered_runsc.run(argv, seccomp=None)
    assert without.status == 0
    assert (with_filter.status, with_filter.stdout) == (0, without.stdout), with_filter.stderr.decode()[-2000:]


@pytest.mark.parametrize(("agent", "profile", "argv"), [
    ("hello", "python3", ["/usr/bin/python3", "-I", "-B", "main.py"]),
    ("librarian", "python3", ["/usr/bin/python3", "-I", "-B", "main.py"]),
    ("wordcount", "node", ["/usr/bin/node", "main.js"]),
    ("checksum", "static", ["./bin/checksum"]),
])  # fmt: skip
def test_sample_agents_run_within_their_profiles(agent: str, profile: str, argv: list[str]) -> None:
    line = json.dumps({"intent_id": "i", "text": "which package mentions seccomp"}).encode() + b"\n"
    package = plain_runsc.Mount("/workspace", AGENTS / agent)
    done = filtered_runsc.run(argv, seccomp=profile_filter(profile), mounts=[package], cwd="/workspace", stdin=line)
    assert done.status == 0, done.stderr.decode()[-2000:]
    assert isinstance(json.loads(done.stdout)["text"], str)

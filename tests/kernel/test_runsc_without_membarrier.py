"""gVisor as Covenant starts it, under a kernel without membarrier(2).

It prints nothing, and tells its guests that they have none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import sys

from policy import data
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import spawn
from sandbox.kernel.runsc import command
from sandbox.kernel.seccomp import dump
from tests.kernel import live_runs, plain_runsc
from tests.kernel.world import World

ARCH = platform.machine()
MEMBARRIER = data.syscalls(ARCH).numbers["membarrier"]
# membarrier(2): QUERY is 0, REGISTER_PRIVATE_EXPEDITED, which gVisor asks for and waits for, is 16.
ASK = f"""
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
answer = []
for command in (0, 16):
    ctypes.set_errno(0)
    answer.append([libc.syscall(ctypes.c_long({MEMBARRIER}), command, 0, 0), ctypes.get_errno()])
"""
TELL = ASK + "print(json.dumps(answer))"
PRIVATE_EXPEDITED = 8 | 16


def told(program: str, *arguments: str, own: bytes) -> tuple[int, bytes, bytes]:
    launch = proc_launch.Launch(program, [program, *arguments], command.ENVIRONMENT, filter=own)
    with spawn.spawn(launch) as child, open(child.stdout, "rb", closefd=False) as out:
        printed = out.read()
        with open(child.stderr, "rb", closefd=False) as error:
            return child.reap(), printed, error.read()


def test_program_so_started_finds_no_such_call_and_every_other(way: str) -> None:
    status, printed, said = told(sys.executable, "-I", "-c", TELL, own=command.own_filter(ARCH))
    assert (status, json.loads(printed), said) == (0, [[-1, errno.ENOSYS]] * 2, b"")
    status, printed, said = told(sys.executable, "-I", "-c", TELL, own=b"")
    (query, _), registered = json.loads(printed)
    # This kernel has it, so that the line above is the filter's doing.
    assert query & PRIVATE_EXPEDITED == PRIVATE_EXPEDITED
    assert registered == [0, 0]


def test_gvisor_goes_on_without_word() -> None:
    """A warning of a failed call would go to its caller's output, and that is an agent's stderr."""
    status, printed, said = told(plain_runsc.find_runsc(), "--version", own=command.own_filter(ARCH))
    assert (status, said) == (0, b"")
    assert printed.startswith(b"runsc version")


def test_agent_is_told_that_there_is_none(world: World) -> None:
    """A grant of the call is kept, and its answer is that of a kernel which can do nothing of it."""
    code = TELL.replace("print(", "print(json.dumps({'text': ").replace("answer))", "answer)}))")
    answer = world.run_code("import sys\nsys.stdin.readline()\n" + code)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.stderr == ""
    (query, error), (registered, why) = json.loads(answer.result.text)
    assert (query, error) in ((0, 0), (-1, errno.ENOSYS))
    assert registered == -1
    assert why in (errno.EINVAL, errno.ENOSYS)
    # gVisor as such has it.
    plain = plain_runsc.run(["/usr/bin/python3", "-I", "-c", TELL])
    assert plain.status == 0, plain.stderr
    (query, _), registered = json.loads(plain.stdout)
    assert query & PRIVATE_EXPEDITED == PRIVATE_EXPEDITED
    assert registered == [0, 0]


def test_every_process_of_run_is_under_it(world: World) -> None:
    own = command.own_filter(ARCH)
    digest = f"{len(own) // 8}:{hashlib.sha256(own).hexdigest()}"
    with live_runs.live(world) as one:
        family = one.family()
        for member in (family.runner, family.gofer, family.sandbox):
            loaded = dump.digests(member.name.pid)
            assert loaded is not None
            assert loaded[family.runner.filters - 1] == digest, member
        # What it is started under is no filter of its own: attestation asks for one beside it.
        assert one.report().holds, [layer for layer in one.report().layers if not layer.holds]

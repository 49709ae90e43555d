"""trusted-local on the real kernel: the agent's identity, what it cannot reach, and that nothing of it remains.

Each denial is beside a control in which the same probe succeeds or fails differently. Every probe runs inside
``trusted_local.run`` (its own uid, mounts and pids); a control differs in one part of the plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from policy import contract, data, errors
from policy.compile import seccomp
from policy.compile import trusted_local as compiler
from policy.manifest import parse
from policy.package import Package
from policy.prove import local
from sandbox.host import facts
from sandbox.kernel import libc
from sandbox.kernel.net import netns
from sandbox.kernel.seccomp import load
from sandbox.run_io import Limits, RunOutcome
from sandbox.runner import trusted_local
from tests.doubles.run_parts import Observer
from tests.kernel.world import HEAD, TAIL, World

ROOT = Path(__file__).resolve().parents[2]
# No account of any machine, and outside the range of the sandboxed runs.
AGENT = trusted_local.Identity("nobody-in-particular", 3_141_592, 3_141_592)
MS_SHARED = 1 << 20  # mount(2)
INTENT = b'{"id":"1","text":"what?","issuer":{},"issued_at":1,"priority":"normal","parent":null}\n'

PRELUDE = """
import ctypes, errno, json, os, resource, signal, socket, sys, time
def tried(action):
    try:
        value = action()
        return ["ok", value if isinstance(value, (int, str, list, type(None))) else str(value)]
    except OSError as e:
        return [errno.errorcode.get(e.errno, str(e.errno)), None]
    except MemoryError:
        return ["MemoryError", None]
def answer(value):
    print(json.dumps({"text": json.dumps(value)}), flush=True)
intent = sys.stdin.readline()
"""


@pytest.fixture
def state() -> Iterator[Path]:
    """A COVENANT_STATE outside /tmp, which every run covers anyway; with a key and a log that anyone may read."""
    folder = Path(f"/var/lib/covenant-test-{uuid.uuid4()}")
    folder.mkdir(mode=0o700)
    yield folder
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder)


def manifest(**values: object) -> bytes:
    given = {"network": "off", "memory_mb": 256, "disk_mb": 4, "filesystem": "ephemeral", "runtime": "python3"}
    v = {**given, "entry": "main.py", "extra": "", **values}
    return textwrap.dedent(
        f"""
        [agent]
        id = "probe"
        name = "probe"
        version = "1"
        runtime = "{v["runtime"]}"
        entry = "{v["entry"]}"
        [resources]
        network = "{v["network"]}"
        memory_mb = {v["memory_mb"]}
        disk_mb = {v["disk_mb"]}
        pids_max = {v.get("pids_max", 64)}
        [sandbox]
        filesystem = "{v["filesystem"]}"
        {v["extra"]}
        """
    ).encode()


def plan_of(raw: bytes, *, demand: local.RefusedCalls | None = None, **changes: Any) -> trusted_local.Plan:
    found = parse.parse(raw)
    policy = compiler.compile(found, arch=facts.architecture(), signed=False)
    program = {"python3": "/usr/bin/python3", "node": "/usr/bin/node"}.get(policy.runtime, f"/mnt/{policy.entry}")
    demand = demand or local.demanded(found)
    return trusted_local.Plan(structs.replace(policy, **changes), AGENT, program, demand)


def run(
    state: Path,
    code: str,
    *,
    plan: Callable[[bytes], trusted_local.Plan] = plan_of,
    seconds: float = 20,
    grace: float = 0.5,
    hidden: tuple[str, ...] = (),
    files: Mapping[str, bytes] | None = None,
    **values: object,
) -> RunOutcome:
    raw = manifest(**values)
    source = (PRELUDE + textwrap.dedent(code)).encode()
    return trusted_local.run(
        plan(raw),
        package=Package({"agent.toml": raw, "main.py": source, **(files or {})}),
        run_id=str(uuid.uuid4()),
        intent=INTENT,
        limits=Limits(start_seconds=20, task_seconds=seconds, task_clock="timeout", grace_seconds=grace),
        state=state,
        hidden=hidden,
        observer=Observer(),
    )


def value(finished: RunOutcome) -> Any:
    assert finished.error is None, (finished.error, finished.stderr)
    return json.loads(contract.parse_result(finished.stdout).text)


def alive(token: str) -> list[int]:
    """Host processes whose command line holds the token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if token.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


# A line of an agent's shell that waits for the test, which writes into the agent's scratch (go).
UNTIL_GO = "until [ -e /tmp/go ]; do sleep 0.05; done"


def go(token: str) -> None:
    """Let the agent go on that waits with the token on its command line, if there is one."""
    for pid in alive(token):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/root/tmp/go").touch()


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# --- who it is ------------------------------------------------------------------------------------------------


def test_agent_is_plain_user_with_nothing_of_ours(state: Path) -> None:
    leaked = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    os.environ["COVENANT_TEST_SECRET"] = "x"
    try:
        seen = value(
            run(
                state,
                """
                fds = {}
                for fd in range(0, 64):
                    try: fds[fd] = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
                    except OSError: pass
                status = dict(l.rstrip().split(":", 1) for l in open("/proc/self/status"))
                answer({
                    "ids": [*os.getresuid(), *os.getresgid()], "groups": os.getgroups(), "fds": fds,
                    "status": {k: v.strip() for k, v in status.items()}, "env": dict(os.environ), "cwd": os.getcwd(),
                    "pids": sorted(int(p) for p in os.listdir("/proc") if p.isdigit()),
                    "session": os.getsid(0) == os.getpid(), "umask": os.umask(0),
                    "core": resource.getrlimit(resource.RLIMIT_CORE), "intent": intent,
                    "ignored": [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_DFL],
                })
                """,
            )
        )
    finally:
        os.close(leaked)
        del os.environ["COVENANT_TEST_SECRET"]
    assert seen["ids"] == [AGENT.uid] * 6
    assert seen["groups"] == []
    assert seen["fds"] == {"0": "pipe", "1": "pipe", "2": "pipe"}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(seen["status"][name], 16) == 0, name
    assert (seen["status"]["NoNewPrivs"], seen["status"]["Seccomp"]) == ("1", "2")
    assert set(seen["env"]) == {"PATH", "HOME", "LANG", "COVENANT_RUN_ID"}
    assert (seen["env"]["LANG"], seen["env"]["HOME"], seen["cwd"]) == ("C.UTF-8", "/tmp", "/mnt")
    assert seen["pids"] == [1, 2]
    assert seen["session"]
    assert (seen["umask"], seen["core"], seen["ignored"]) == (0o077, [1, 1], [])
    assert seen["intent"] == INTENT.decode()


def test_control_of_descriptor_leak_leaks() -> None:
    """A child that marks nothing does inherit that descriptor: the test above would see one."""
    leaked = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        listed = subprocess.run(["/bin/ls", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)
    finally:
        os.close(leaked)
    assert str(leaked) in listed.stdout.split()


def test_uid_or_gid_0_never_runs_even_if_plan_says_so(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_local, "_covers", lambda hidden, plan: [])
    for uid, gid in ((0, AGENT.gid), (AGENT.uid, 0)):
        root = trusted_local.Identity("r", uid, gid)

        def plan(raw: bytes, identity: trusted_local.Identity = root) -> trusted_local.Plan:
            return structs.replace(plan_of(raw), identity=identity)

        with pytest.raises(errors.KernelError, match="as root"):
            run(state, "answer(1)", plan=plan)


def test_without_root_it_is_clear_refusal() -> None:
    program = (
        # Imported first: the clone may lie where an ordinary user cannot read it.
        "from sandbox.runner import trusted_local as t; from policy import errors\n"
        "import os; os.setresuid(65534, 65534, 65534)\n"
        "try: t._need_root()\n"
        "except errors.PrivilegeError as e: print(e.code, e.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("needs_root run it with sudo")


# --- what it cannot read or change ------------------------------------------------------------------------------


@pytest.fixture
def secrets(state: Path) -> Iterator[list[Path]]:
    """Keys, the log and the vault, with modes that would let anybody read them."""
    home = Path(f"/var/lib/covenant-test-home-{uuid.uuid4()}")
    places = [state / "audit/events.jsonl", state / "audit-head/ledger.key", home / "keys/op.key"]
    for place in places:
        place.parent.mkdir(parents=True, mode=0o755)
        place.write_text("secret")
    for path in (state, home, *(p.parent for p in places), *places):
        path.chmod(0o755)
    yield places
    shutil.rmtree(home)


READ = "answer([tried(lambda p=p: open(p).read()) for p in PATHS])"


def test_keys_and_log_cannot_be_read(state: Path, secrets: list[Path]) -> None:
    code = f"PATHS = {[str(p) for p in secrets]!r}\n{READ}"
    home = secrets[-1].parents[1]
    assert [p.read_text() for p in secrets] == ["secret"] * 3  # control: root reads them

    # Control: the same agent without the covers reads what the modes allow, so the probe does read.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trusted_local, "_covers", lambda hidden, plan: [])
        assert value(run(state, code, hidden=(str(home),))) == [["ok", "secret"]] * 3

    assert value(run(state, code, hidden=(str(home),))) == [["EACCES", None]] * 3

    # And the modes alone hold it, should a cover ever be missing.
    for path in (state, home):
        path.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trusted_local, "_covers", lambda hidden, plan: [])
        assert value(run(state, code, hidden=(str(home),))) == [["EACCES", None]] * 3


def test_directory_of_agents_own_user_is_not_place_for_keys(state: Path) -> None:
    os.chown(state, AGENT.uid, AGENT.gid)
    with pytest.raises(errors.HomeError, match="belongs to user"):
        run(state, "answer(1)")


@pytest.mark.parametrize("path", ["/", "/usr", "/var", "/mnt"])
def test_what_agent_needs_cannot_be_hidden(state: Path, path: str) -> None:
    with pytest.raises(errors.HomeError, match="cannot be hidden"):
        run(state, "answer(1)", hidden=(path,))


def test_another_runs_files_and_processes_are_out_of_reach(state: Path) -> None:
    """Both runs have the same uid: what keeps them apart are their own /tmp and pid namespace."""
    token = f"token-{uuid.uuid4()}"
    first: list[RunOutcome] = []
    code = f"""
        open("/tmp/secret", "w").write("mine")
        os.execv("/bin/sh", ["/bin/sh", "-c", ": {token}; {UNTIL_GO}; cat /tmp/secret >&2; echo '{{}}'"])
    """
    thread = threading.Thread(target=lambda: first.append(run(state, code)))
    thread.start()
    try:
        assert eventually(lambda: len(alive(token)) >= 1)
        (pid, *_) = alive(token)
        secret = f"/proc/{pid}/root/tmp/secret"

        # Control: a process of the same uid outside reaches into the run through /proc, and may signal it.
        script = (
            f"import os; os.setgroups([]); os.setresgid({AGENT.gid},{AGENT.gid},{AGENT.gid}); "
            f"os.setresuid({AGENT.uid},{AGENT.uid},{AGENT.uid}); print(open({secret!r}).read()); os.kill({pid}, 0)"
        )
        outside = subprocess.run(["/usr/bin/python3", "-c", script], capture_output=True, text=True)
        assert (outside.returncode, outside.stdout.strip()) == (0, "mine"), outside.stderr

        seen = value(
            run(
                state,
                f"""
                answer([
                    tried(lambda: open("/tmp/secret").read()), tried(lambda: open({secret!r}).read()),
                    tried(lambda: os.kill({pid}, 0)), os.listdir("/dev/shm"), os.listdir("/var/tmp"),
                ])
                """,
            )
        )
        assert seen == [["ENOENT", None], ["ENOENT", None], ["ESRCH", None], [], []]
    finally:
        go(token)
        thread.join()
    assert b"mine" in first[0].stderr


def test_host_is_read_only_and_scratch_is_thrown_away(state: Path) -> None:
    world = Path(f"/var/lib/covenant-test-world-{uuid.uuid4()}")
    world.mkdir()
    world.chmod(0o777)
    try:
        # Control: the modes would let anyone write there.
        can = f"import os; os.setresuid({AGENT.uid},{AGENT.uid},{AGENT.uid}); open('{world}/x', 'w')"
        assert subprocess.run(["/usr/bin/python3", "-c", can]).returncode == 0
        (world / "x").unlink()
        code = f"""
            answer([tried(lambda p=p: open(p, "w").write("x")) for p in
                    ("{world}/x", "/mnt/main.py", "/mnt/new", "/tmp/x", "/dev/shm/y", "/var/tmp/z", "/dev/null")])
        """
        seen = value(run(state, code))
        assert seen[0] == ["EROFS", None]
        assert [s[0] for s in seen[1:3]] == ["EROFS", "EROFS"] or [s[0] for s in seen[1:3]] == ["EACCES", "EROFS"]
        assert seen[3:] == [["ok", 1]] * 4
        assert not Path("/tmp/x").exists() or Path("/tmp/x").stat().st_uid != AGENT.uid

        # read-only-package has no writable directory at all; the device is the control.
        seen = value(run(state, code, filesystem="read-only-package"))
        assert {s[0] for s in seen[3:6]} <= {"EROFS", "EACCES"}
        assert seen[6] == ["ok", 1]
    finally:
        shutil.rmtree(world)


def test_package_is_bytes_that_were_verified(state: Path) -> None:
    finished = run(
        state,
        """
        answer([sorted(os.listdir(".")), open("lib/data.txt").read(), oct(os.stat("main.py").st_mode & 0o777),
                os.stat("main.py").st_uid])
        """,
        files={"lib/data.txt": b"bytes"},
    )
    assert value(finished) == [["agent.toml", "lib", "main.py"], "bytes", "0o444", 0]


# --- the filter -------------------------------------------------------------------------------------------------

# Arguments on which the kernel itself says something else than EPERM to a plain user: without the filter that is
# what is seen, with it EPERM comes first.
CALLS: dict[str, tuple[list[int], str]] = {
    "mount": ([-1, -1, -1, 0, -1], "EFAULT"),
    "ptrace": ([0, 0, 0, 0], "ok"),
    "process_vm_readv": ([2**30, 0, 0, 0, 0, 0], "ok"),
    "keyctl": ([0, -3, 0], "ok"),
    "add_key": ([-1, -1, -1, 0, 0], "EFAULT"),
    "unshare": ([0], "ok"),
    "io_uring_setup": ([0, -1], "EFAULT"),
    "open_tree": ([-1, -1, 0], "EFAULT"),
    "kcmp": ([2**30, 2**30, 0, 0, 0], "ESRCH"),
}


def test_denied_calls_get_eperm_and_fail_otherwise_without_filter(state: Path) -> None:
    numbers = data.syscalls(facts.architecture()).numbers
    calls = {name: (numbers[name], args) for name, (args, _) in CALLS.items()}
    code = f"""
        libc = ctypes.CDLL(None, use_errno=True)
        def call(number, *args):
            if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args]) < 0:
                raise OSError(ctypes.get_errno(), "")
        answer({{name: tried(lambda: call(number, *args))[0] for name, (number, args) in {calls!r}.items()}})
    """
    nothing = seccomp.DenyFilter(facts.architecture(), (), ())
    without = value(run(state, code, plan=lambda raw: plan_of(raw, filter=nothing, demand=local.RefusedCalls())))
    assert without == {name: outcome for name, (_, outcome) in CALLS.items()}
    assert value(run(state, code)) == dict.fromkeys(CALLS, "EPERM")


def lacking(rule: str) -> Callable[[bytes], trusted_local.Plan]:
    """A plan whose compiler forgot one call."""

    def plan(raw: bytes) -> trusted_local.Plan:
        whole = plan_of(raw).policy.filter
        rules = tuple(kept for kept in whole.rules if kept.name != rule)
        assert len(rules) < len(whole.rules)
        return plan_of(raw, filter=structs.replace(whole, rules=rules))

    return plan


@pytest.mark.parametrize("rule", ["bpf", "clone", "clone3", "socket"])
def test_filter_that_lacks_rule_stops_run(state: Path, rule: str) -> None:
    with pytest.raises(errors.ProofError, match=f"`{rule}`"):
        run(state, 'open("/tmp/ran", "w"); answer(1)', plan=lacking(rule))
    assert list(state.iterdir()) == [], "not even the package was copied"


def test_fault_of_libseccomp_stops_run(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, numbers = load.export, data.syscalls(facts.architecture()).numbers

    def faulty(prepared: Any) -> bytes:
        # Where the number of bpf is compared with, a second comparison with that of ptrace: bpf would pass.
        compared = struct.pack("<I", numbers["bpf"])
        program = honest(prepared)
        assert program.count(compared) == 1
        return program.replace(compared, struct.pack("<I", numbers["ptrace"]))

    monkeypatch.setattr(load, "export", faulty)
    with pytest.raises(errors.ProofError, match="`bpf`"):
        run(state, "answer(1)")
    monkeypatch.undo()
    assert value(run(state, "answer(1)")) == 1


def test_failed_proof_is_told_and_logged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compiler.compile

    def faulty(*given: Any, **named: Any) -> compiler.LocalPolicy:
        policy = honest(*given, **named)
        rules = tuple(rule for rule in policy.filter.rules if rule.name != "unshare")
        return structs.replace(policy, filter=structs.replace(policy.filter, rules=rules))

    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false"}
    monkeypatch.setattr(compiler, "compile", faulty)
    with pytest.raises(errors.ProofError, match="does not refuse `unshare`"):
        world.run_code(f"{HEAD}answer = 1{TAIL}", **fields)
    assert world.rows()[-1]["kind"]["code"] == "proof_failed"
    monkeypatch.undo()
    assert world.ask("answer = 1", **fields) == 1


def test_manifests_own_deny_list_is_loaded(state: Path) -> None:
    code = 'answer([tried(lambda: os.symlink("a", "/tmp/b")), tried(lambda: os.mkdir("/tmp/c"))])'
    deny = '[permissions.syscalls]\n        deny = ["symlink", "symlinkat"]'
    assert value(run(state, code)) == [["ok", None], ["ok", None]]
    assert value(run(state, code, extra=deny)) == [["EPERM", None], ["ok", None]]


# Numbers, because not every libc names them all: netlink, packet, RDS, TIPC, bluetooth, ALG, vsock, KCM, SMC, XDP,
# and 45, of which no kernel knows anything (linux/socket.h).
FOREIGN = (16, 17, 21, 30, 31, 38, 40, 41, 43, 44, 45)
FAMILIES = f"""
    def opened(*given): return tried(lambda: socket.socket(*given).close())[0]
    def devices(): return sorted(l.split(":")[0].strip() for l in open("/proc/net/dev") if ":" in l)
    foreign = [opened(family, kind) for family in {FOREIGN} for kind in (1, 2, 3, 5)]
    answer([[opened(f, k) for f in (1, 2, 10) for k in (1, 2)], sorted(set(foreign)),
            tried(lambda: [s.close() for s in socket.socketpair()])[0], devices(),
            tried(lambda: os.listdir("/run"))[0]])
"""


def without_sockets(raw: bytes) -> trusted_local.Plan:
    """The plan of `raw`, whose filter lacks the rules of socket and socketpair."""
    honest = plan_of(raw)
    rules = tuple(rule for rule in honest.policy.filter.rules if rule.name not in ("socket", "socketpair"))
    demand = structs.replace(
        honest.demand, only={n: c for n, c in honest.demand.only.items() if n not in ("socket", "socketpair")}
    )
    policy = structs.replace(honest.policy, filter=structs.replace(honest.policy.filter, rules=rules))
    return structs.replace(honest, policy=policy, demand=demand)


def test_network_off_leaves_unix_sockets_and_nothing_else(state: Path) -> None:
    off = value(run(state, FAMILIES))
    assert off == [["ok"] * 2 + ["EPERM"] * 4, ["EPERM"], "ok", ["lo"], "EACCES"]


def test_network_full_leaves_tcp_udp_and_unix(state: Path) -> None:
    full = value(run(state, FAMILIES, network="full"))
    devices = sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    assert full == [["ok"] * 6, ["EPERM"], "ok", devices, "ok"]
    # Without the rules the same probe reaches the kernel's own answers.
    free = value(run(state, FAMILIES, network="full", plan=without_sockets))
    assert free[0] == ["ok"] * 6
    assert "ok" in free[1]
    assert "EAFNOSUPPORT" in free[1]


def test_network_full_refuses_other_protocols(state: Path) -> None:
    code = """
        def opened(*given): return tried(lambda: socket.socket(*given).close())[0]
        answer([[opened(2, 1, 6), opened(10, 2, 17)],
                [opened(2, *given) for given in ((2, 1), (3, 1), (1, 132), (5, 0), (1, 262), (2, 136))]])
    """
    assert value(run(state, code, network="full")) == [["ok", "ok"], ["EPERM"] * 6]
    free = value(run(state, code, network="full", plan=without_sockets))
    assert free[0] == ["ok", "ok"]
    assert free[1][5] == "ok"  # UDP-Lite is in every kernel with IPv4 and asks for no capability


def test_network_full_resolves_and_connects(state: Path) -> None:
    """glibc asks netlink which families have addresses; refused, it takes all."""
    code = """
        import asyncio
        def looked(flags): return len(socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM, flags=flags)) > 0
        async def told():
            async def serve(reader, writer):
                writer.write(await reader.readline()); await writer.drain(); writer.close()
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
            writer.write(b"hello\\n")
            line = await reader.readline()
            writer.close(); server.close()
            return line.decode()
        answer([looked(0), looked(socket.AI_ADDRCONFIG), asyncio.run(told()), tried(socket.if_nameindex)[0]])
    """
    assert value(run(state, code, network="full")) == [True, True, "hello\n", "EPERM"]
    assert value(run(state, code, network="full", plan=without_sockets))[3] == "ok"


def test_network_full_lets_node_resolve_and_connect(state: Path) -> None:
    script = b"""
        const net = require("net"), dns = require("dns"), os = require("os");
        const interfaces = () => {
            try { os.networkInterfaces(); return "ok"; } catch (e) { return e.info.message; }
        };
        process.stdin.once("data", () => dns.lookup("localhost", {hints: dns.ADDRCONFIG}, (error, address) => {
            const server = net.createServer(s => s.end("hello")).listen(0, "127.0.0.1", () =>
                net.connect(server.address().port, "localhost").on("data", d => {
                    console.log(JSON.stringify({text: [String(error), d, interfaces()].join(" ")}));
                    server.close();
                }));
        }));
    """
    given: dict[str, Any] = {"runtime": "node", "entry": "main.js", "memory_mb": 4096, "network": "full"}
    for plan, interfaces in ((plan_of, "Unknown system error 1"), (without_sockets, "ok")):
        finished = run(state, "", files={"main.js": script}, plan=plan, **given)
        assert finished.error is None, (finished.error, finished.stderr)
        assert contract.parse_result(finished.stdout).text == f"null hello {interfaces}"


# --- limits -----------------------------------------------------------------------------------------------------


def test_crash_dumps_no_core(state: Path) -> None:
    """The limit is 1, not 0: a handler of core_pattern gets no dump then (policy.core_dumps)."""
    code = """
        pid = os.fork()
        if pid == 0:
            os.chdir("/tmp")
            os.abort()
        status = os.waitpid(pid, 0)[1]
        answer([os.WTERMSIG(status), os.WCOREDUMP(status), os.listdir("/tmp"),
                *resource.getrlimit(resource.RLIMIT_CORE)])
    """
    assert value(run(state, code)) == [signal.SIGABRT, False, [], 1, 1]


def test_memory_mb_bounds_address_space(state: Path) -> None:
    code = "answer(tried(lambda: len(bytearray(200 * 1024 * 1024))))"
    assert value(run(state, code, memory_mb=128)) == ["MemoryError", None]
    assert value(run(state, code, memory_mb=512)) == ["ok", 200 * 1024 * 1024]


def test_disk_mb_bounds_file_and_scratch_together(state: Path) -> None:
    code = """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def write(path, mib):
            with open(path, "wb", buffering=0) as f:
                for _ in range(mib): f.write(b"x" * 1024 * 1024)
        answer([tried(lambda p=p, n=n: write(p, n)) for p, n in (("/tmp/a", 3), ("/var/tmp/b", 3), ("/tmp/c", 9))])
    """
    assert [s[0] for s in value(run(state, code, disk_mb=20))] == ["ok"] * 3
    small = [s[0] for s in value(run(state, code, disk_mb=4))]
    assert small == ["ok", "ENOSPC", "ENOSPC"]
    # The file limit itself, where the scratch would have room.
    seen = value(run(state, code, plan=lambda raw: plan_of(raw, scratch_bytes=64 * 2**20), disk_mb=4))
    assert [s[0] for s in seen] == ["ok", "ok", "EFBIG"]


def test_disk_mb_0_is_no_disk_and_not_endless_one(state: Path) -> None:
    code = 'answer(tried(lambda: open("/tmp/a", "w").write("x")))'
    seen = value(run(state, code, plan=lambda raw: plan_of(raw, scratch_bytes=0)))
    assert seen[0] in ("EROFS", "EACCES")


def test_pids_max_bounds_processes_exactly(state: Path) -> None:
    code = """
        children = []
        def start():
            pid = os.fork()
            if pid == 0:
                time.sleep(30); os._exit(0)
            children.append(pid)
        outcome = "none"
        while len(children) < 30:
            outcome = tried(start)[0]
            if outcome != "ok": break
        answer([outcome, len(children)])
    """
    assert value(run(state, code, pids_max=10)) == ["EAGAIN", 9]
    assert value(run(state, code, pids_max=64)) == ["ok", 30]


# --- the end ----------------------------------------------------------------------------------------------------

DAEMON = """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
        if os.fork() == 0:
            os.execv("/bin/sh", ["/bin/sh", "-c", "trap '' TERM; : {token}; while :; do sleep 1; done"])
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_daemon_of_agent_dies_with_it(state: Path) -> None:
    token = f"token-{uuid.uuid4()}"
    out: list[RunOutcome] = []
    code = (
        textwrap.dedent(DAEMON.format(token=token))
        + "while not os.path.exists('/tmp/go'): time.sleep(0.05)\nanswer(1)\n"
    )
    thread = threading.Thread(target=lambda: out.append(run(state, code)))
    thread.start()
    assert eventually(lambda: bool(alive(token)))  # control: it did live
    go(token)
    thread.join()
    assert value(out[0]) == 1
    assert alive(token) == []


def test_agent_that_ignores_sigterm_ends_after_its_grace(state: Path) -> None:
    token = f"token-{uuid.uuid4()}"
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + textwrap.dedent(DAEMON.format(token=token))
        + "while True: time.sleep(1)\n"
    )
    finished = run(state, code, seconds=5)  # it has long said by then what it does with SIGTERM
    assert isinstance(finished.error, errors.DeadlineError)
    assert finished.exit_status == 137
    assert alive(token) == []


def test_agent_that_minds_sigterm_may_clean_up(state: Path) -> None:
    code = """
        def end(*_):
            print("cleaned up", file=sys.stderr, flush=True); sys.exit(3)
        signal.signal(signal.SIGTERM, end)
        while True: time.sleep(1)
    """
    finished = run(state, code, seconds=5, grace=5)  # as above
    assert isinstance(finished.error, errors.DeadlineError)
    assert b"cleaned up" in finished.stderr
    assert (finished.exit_status, finished.error.details) == (3, {"clock": "timeout"})


def test_agent_cannot_end_or_signal_what_stands_above_it(state: Path) -> None:
    seen = value(run(state, "answer([tried(lambda: os.kill(1, s))[0] for s in (signal.SIGKILL, signal.SIGUSR1, 0)])"))
    assert seen == ["EPERM"] * 3


def test_stdout_flood_ends_and_is_named(state: Path) -> None:
    finished = run(state, 'while True: os.write(1, b"x" * 65536)')
    assert isinstance(finished.error, errors.OutputTooLargeError)


def test_agents_own_failure_is_told_from_ours(state: Path) -> None:
    finished = run(state, "sys.exit(5)")
    assert isinstance(finished.error, errors.AgentFailedError)
    assert finished.exit_status == 5
    finished = run(state, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert finished.exit_status == 128 + signal.SIGSEGV


SUPERVISOR = """
import sys; sys.path[:0] = [{root!r}, {here!r}]
import pathlib, test_trusted_local as t
t.run(pathlib.Path({state!r}), {code!r}, seconds=60)
"""


def test_killed_supervisor_leaves_no_agent(state: Path) -> None:
    token = f"token-{uuid.uuid4()}"
    code = textwrap.dedent(DAEMON.format(token=token)) + "time.sleep(60)\n"
    script = SUPERVISOR.format(root=str(ROOT), here=str(Path(__file__).parent), state=str(state), code=code)
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True) as child:
        try:
            assert eventually(lambda: len(set(alive(token)) - {child.pid}) >= 2)
        finally:
            child.kill()
    assert eventually(lambda: alive(token) == [])


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({"program": "/nonexistent/python3"}, "execute /nonexistent/python3: No such file"),
        ({"program": "/mnt/agent.toml"}, "execute /mnt/agent.toml: Permission denied"),
    ],
)
def test_failed_step_is_named_and_nothing_runs(state: Path, change: dict[str, Any], step: str) -> None:
    with pytest.raises(errors.KernelError, match=step):
        run(state, "answer(1)", plan=lambda raw: structs.replace(plan_of(raw), **change))


def test_cover_that_cannot_be_mounted_stops_run(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = state / "file"
    file.touch()
    monkeypatch.setattr(trusted_local, "_covers", lambda hidden, plan: [str(file)])
    with pytest.raises(errors.KernelError, match=f"hide {file}: mount: Not a directory"):
        run(state, "answer(1)")


def _children() -> set[str]:
    """Return the children of this process, zombies included."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_machine_is_as_it_was(state: Path) -> None:
    def work() -> None:
        # Other tests mount in the machine's namespace meanwhile. Here a mount of a run that was not private would stay.
        libc.private_mounts()
        libc.mount("none", "/", flags=libc.MS_REC | MS_SHARED)
        before = Path("/proc/thread-self/mountinfo").read_text(), sorted(os.listdir("/proc/self/fd"))
        value(run(state, "answer(1)"))
        run(state, "time.sleep(60)", seconds=0.2, grace=0.1)
        with pytest.raises(errors.KernelError):
            run(state, "answer(1)", plan=lambda raw: structs.replace(plan_of(raw), program="/nonexistent"))
        assert (Path("/proc/thread-self/mountinfo").read_text(), sorted(os.listdir("/proc/self/fd"))) == before

    # Another test of this process may have left one that is still to be waited for.
    children = _children()
    netns.aside(work)()
    assert _children() <= children


# --- the other runtimes -----------------------------------------------------------------------------------------


def test_compiled_agent_runs_from_package(state: Path) -> None:
    """cat answers with the intent, which happens to be a result: an ELF file, executable in the package alone."""
    finished = run(state, "", runtime="rust-bin", entry="bin/agent", files={"bin/agent": Path("/bin/cat").read_bytes()})
    assert finished.error is None, finished.stderr
    assert contract.parse_result(finished.stdout).text == "what?"


def test_node_agent_runs_with_room_for_its_address_space(state: Path) -> None:
    script = b"process.stdin.once('data', d => console.log(JSON.stringify({text: JSON.parse(d).text})))"
    finished = run(state, "", runtime="node", entry="main.js", memory_mb=4096, files={"main.js": script})
    assert finished.error is None, (finished.error, finished.stderr)
    assert contract.parse_result(finished.stdout).text == "what?"

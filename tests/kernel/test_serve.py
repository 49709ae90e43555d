"""The supervisor as a process of its own: who may ask, what is answered, and what is left when either side dies."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli.run import doctor
from policy import errors
from sandbox.run_result import RunResult
from sandbox.rundir import registry
from sandbox.serve import hardening
from sandbox.serve.api import client
from sandbox.storage.trust_state import State
from tests.kernel import internet, serving
from tests.kernel.conftest import leftovers
from tests.kernel.serving import CALLER, STRANGER, Served, asked, covenant
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World

# Says that it is there, and then works for a minute.
LONG = HEAD + "print('here', file=sys.stderr, flush=True)\nimport time\ntime.sleep(60)\nanswer = 1\n" + TAIL


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        world = made.world
        yield made
        made.quiet()
        assert leftovers(world) == []


@pytest.fixture(scope="module")
def hello(served: Served) -> Path:
    return served.world.sign(served.world.copy("hello"))


@pytest.fixture(scope="module")
def long(served: Served) -> Path:
    return served.world.sign(served.world.package({"main.py": LONG}, name="long", id="long", cpu_ms=60000 * SLOWNESS))


def eventually(look: Callable[[], Any], seconds: float = 60.0 * SLOWNESS) -> Any:
    """Return the value of ``look`` once it is true."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def live(world: World, agent_id: str) -> list[registry.Entry]:
    return [one for one in registry.live(world.state / "runs") if one.agent_id == agent_id]


def ended(world: World, run_id: str) -> list[dict[str, Any]]:
    kinds = [row["kind"] for row in world.rows()]
    return [kind for kind in kinds if kind["type"] == "run_ended" and kind["run_id"] == run_id]


def running(world: World, agent_id: str) -> registry.Entry:
    """The run of this agent, once its process runs."""
    entry: registry.Entry = eventually(lambda: live(world, agent_id))[0]
    eventually(lambda: any(row["kind"].get("run_id") == entry.run_id and row["kind"]["type"] == "run_started"
                           for row in world.rows()))  # fmt: skip
    return entry


def _answer(sock: socket.socket) -> dict[str, Any]:
    """Return the answer that follows all messages about states."""
    while (document := client._next(sock))["kind"] == "state":
        pass
    return document


def test_package_with_another_manifest_than_was_seen_is_not_run(served: Served, hello: Path) -> None:
    digest = hashlib.sha256((hello / "agent.toml").read_bytes()).hexdigest()
    with asked(served.path, hello, manifest_sha256=digest) as sock:
        assert _answer(sock)["error"] is None
    before = len(served.world.rows())
    other = hashlib.sha256(b"another").hexdigest()
    with asked(served.path, hello, manifest_sha256=other) as sock:
        answer = _answer(sock)
    assert (answer["kind"], answer["code"]) == ("error", "agent_changed")
    (row,) = served.world.rows()[before:]
    assert (row["kind"]["type"], row["kind"]["code"]) == ("manifest_rejected", "agent_changed")


def _checked(served: Served, package: Path, **fields: Any) -> dict[str, Any]:
    with served.connected() as sock, serving.opened(package) as directory:
        return client.ask(sock, "check_package", fds=[directory], **fields)


def test_package_that_runs_elsewhere_is_verified_and_leaves_no_trace(served: Served) -> None:
    world, before = served.world, len(served.world.rows())
    manifest = (
        '[agent]\nid = "far"\nname = "Far"\nversion = "1.0.0"\nruntime = "hermes"\n[resources]\nnetwork = "off"\n'
    )
    package = world.package({"agent.toml": manifest}, name="far")
    with pytest.raises(errors.UnsignedError):
        _checked(served, package)
    world.sign(package, key=Ed25519PrivateKey.generate())
    with pytest.raises(errors.SignatureError):
        _checked(served, package)
    world.sign(package)
    digest = hashlib.sha256((package / "agent.toml").read_bytes()).hexdigest()
    answer = _checked(served, package, manifest_sha256=digest)
    assert (answer["kind"], answer["agent_id"], answer["trust_root"]) == ("checked", "far", 1)
    assert (answer["manifest_sha256"], bool(answer["signers"])) == (digest, True)
    with pytest.raises(errors.StaleAgentError):
        _checked(served, package, manifest_sha256="0" * 64)
    (package / "more.txt").write_text("nobody signed this")
    with pytest.raises(errors.DigestMismatchError):
        _checked(served, package)
    # Nothing was accepted: the serial is as free as it was, and the log says nothing.
    with State(world.state) as state:
        assert state.accepted("far") is None
    assert len(world.rows()) == before


def test_answer_comes_with_what_was_said_on_way(served: Served, hello: Path) -> None:
    said: list[dict[str, Any]] = []
    answer = served.run(hello, "there", said=lambda state: said.append(dict(state)))
    assert answer.error is None
    assert answer.result is not None
    assert "there" in answer.result.text
    assert said[0]["state"] == "accepted"
    assert said[0]["trust_root"] == 1
    assert answer.policy_digest
    rows = [row for row in served.world.rows() if row["kind"].get("run_id") == answer.run_id]
    started = next(row for row in rows if row["kind"]["type"] == "run_started")
    assert started["kind"]["package"] == str(hello)
    assert {row["issuer"]["display"] for row in rows} == {"operator@local"}
    # The key of the log vouches for who asked, since no key of theirs does.
    with World_ledger(served.world) as key:
        assert {row["issuer"]["pubkey"] for row in rows} == {key}


class World_ledger:  # noqa: N801 - reads as a context at its one use
    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> str:
        from policy import base58

        raw = (self._world.state / "audit-head" / "ledger.pub").read_text().strip()
        return base58.encode(bytes.fromhex(raw))

    def __exit__(self, *exc: object) -> None:
        return None


def test_command_says_same_for_root_and_for_caller(served: Served, hello: Path) -> None:
    answers = []
    for uid in (0, CALLER):
        done = covenant("run", str(hello), "you", "--json", served=served, uid=uid)
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert f"supervisor of {served.world.state}" in done.stderr
        answers.append(json.loads(done.stdout))
    for answer in answers:
        answer["run_id"] = answer["intent_id"] = ""
    assert answers[0] == answers[1]
    row = next(row for row in reversed(served.world.rows()) if row["kind"]["type"] == "run_started")
    assert row["issuer"]["display"] == f"uid{CALLER}@local"


def test_without_supervisor_command_does_it_itself(served: Served, hello: Path, tmp_path: Path) -> None:
    """The control: the same home and state, and no socket where the command looks."""
    environment = {"COVENANT_SOCKET": ""}
    done = covenant("run", str(hello), "you", "--json", served=served, environment=environment)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "supervisor of" not in done.stderr
    gone = covenant(
        "run", str(hello), "you", "--json", served=served, environment={"COVENANT_SOCKET": str(tmp_path / "x")}
    )
    assert json.loads(gone.stdout)["code"] == "supervisor_silent"


def test_command_names_supervisor_beside_installed_one(served: Served, hello: Path) -> None:
    """In a mount namespace with the socket of an installed service, as a unit of systemd has it."""
    link = served.world.state / "supervisor.sock"
    link.symlink_to(served.path)
    listen = "import socket; socket.socket(socket.AF_UNIX).bind('/run/covenant/supervisor.sock')"
    prepare = f'mount -t tmpfs tmpfs /run && mkdir /run/covenant && /usr/bin/python3 -c "{listen}"'
    note = "note: the installed supervisor of /var/lib/covenant is not asked: COVENANT_HOME names another state"
    command = serving.covenant_command("run", str(hello), "you", "--json")
    try:
        for before, found in (("true", 0), (prepare, 1)):
            done = subprocess.run(
                ["/usr/bin/unshare", "-m", "/bin/sh", "-ec", f'{before}; exec "$@"', "sh", *command],
                env=serving.environment_of(served, 0, {"COVENANT_SOCKET": ""}),
                capture_output=True,
                text=True,
                timeout=120 * SLOWNESS,
            )
            assert done.returncode == 0, (done.stdout, done.stderr)
            assert f"supervisor of {served.world.state}" in done.stderr
            assert done.stderr.splitlines().count(note) == found, done.stderr
            assert json.loads(done.stdout)["status"] == "ok"
    finally:
        link.unlink()


def test_who_is_no_caller_is_told_so_and_reaches_nothing(served: Served, hello: Path) -> None:
    before = len(served.world.rows())
    done = covenant("run", str(hello), "you", "--json", served=served, uid=STRANGER)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (1, "not_a_caller")
    assert len(served.world.rows()) == before


def test_refusal_says_what_it_says_in_process(served: Served) -> None:
    unsigned = served.world.package({"main.py": "print(1)\n"}, name="unsigned", id="unsigned")
    with pytest.raises(errors.UnsignedError) as told:
        served.run(unsigned)
    with pytest.raises(errors.UnsignedError) as here:
        served.world.run(unsigned)
    assert told.value.to_json() == here.value.to_json()
    rows = [row["kind"] for row in served.world.rows() if row["kind"]["type"] == "manifest_rejected"]
    assert [row["code"] for row in rows[-2:]] == ["unsigned", "unsigned"]


def test_unsigned_package_is_for_root_alone_even_where_it_is_allowed(warm: Path) -> None:
    with serving.open_place() as base, Served(World(base, warm=warm), allow_unsigned_trusted_local=True) as served:
        world = served.world
        package = world.package(
            {"main.py": HEAD + "answer = os.getuid()\n" + TAIL}, required="false", backend="trusted-local"
        )
        answer = served.run(package)
        assert answer.error is None, answer.error
        done = covenant("run", str(package), "you", "--json", served=served, uid=CALLER)
        assert json.loads(done.stdout)["code"] == "unsigned"
        signed = world.sign(package)
        named = covenant("run", str(signed), "you", "--json", "--as", "covenant-agent", served=served, uid=CALLER)
        assert json.loads(named.stdout)["code"] == "not_a_caller"
        # The supervisor is not in the host's network, and a run that has less than it was granted is no run.
        open_ = world.package(
            {"main.py": "print(1)\n"}, name="open", id="open", required="false", backend="trusted-local", network="full"
        )
        with pytest.raises(errors.NotEnforceableError, match="not in it"):
            served.run(world.sign(open_))
        served.quiet()
        assert leftovers(world) == []


def test_older_payload_mounted_over_place_is_refused(served: Served, long: Path) -> None:
    """A place that only the client sees gives no right: its mount namespace shows an older payload under the path of
    the live one. The serial decides, and the live run goes on (ADR 0062)."""
    served.world.sign(long)
    other = served.world.package({"main.py": "print(1)\n"}, name="over-long", id="long")
    served.world.sign(other, serial=1)
    over = ["unshare", "-m", "sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", str(other), str(long)]
    with serving.asked(served.path, long):
        running(served.world, "long")
        done = subprocess.run(
            [*over, *serving.covenant_command("run", str(long), "x", "--json")], env=serving.environment_of(served, 0),
            capture_output=True, text=True, timeout=120 * SLOWNESS,
        )  # fmt: skip
        assert live(served.world, "long")
    said = json.loads(done.stdout)
    assert (said["code"], said["message"].partition(" is older ")[0]) == ("serial_rollback", "serial 1 of agent `long`")
    served.quiet()


def test_two_run_at_once(served: Served, long: Path, hello: Path) -> None:
    with serving.asked(served.path, long):
        running(served.world, "long")
        assert served.run(hello).error is None
        assert live(served.world, "long")
    eventually(lambda: not live(served.world, "long"))


def test_run_ends_with_whoever_asked_for_it(served: Served, long: Path) -> None:
    with serving.asked(served.path, long):
        entry = running(served.world, "long")
    (row,) = eventually(lambda: ended(served.world, entry.run_id))
    assert (row["status"], row["code"]) == ("failed", "stopped")
    served.quiet()


def test_detached_run_goes_on_without(served: Served) -> None:
    code = HEAD + "import time\ntime.sleep(1)\nanswer = 'done'\n" + TAIL
    package = served.world.sign(served.world.package({"main.py": code}, name="detached", id="detached"))
    with serving.asked(served.path, package, detach=True):
        entry = running(served.world, "detached")
    (row,) = eventually(lambda: ended(served.world, entry.run_id))
    assert (row["status"], row["code"]) == ("ok", None)


def test_interrupted_command_ends_its_run(served: Served, long: Path) -> None:
    with subprocess.Popen(
        serving.covenant_command("run", str(long), "x", "--json"),
        env=serving.environment_of(served, CALLER), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        **serving.identity(CALLER),
    ) as process:  # fmt: skip
        entry = running(served.world, "long")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert json.loads(said)["code"] == "interrupted"
    (row,) = eventually(lambda: ended(served.world, entry.run_id))
    assert row["code"] == "stopped"
    served.quiet()


def test_killed_keeper_takes_its_sandbox_along_and_leaves_nothing(served: Served, long: Path, hello: Path) -> None:
    with serving.asked(served.path, long) as sock:
        entry = running(served.world, "long")
        (keeper,) = eventually(lambda: (found := served.children())[1:] == [] and found)
        os.kill(keeper, signal.SIGKILL)
        (row,) = eventually(lambda: ended(served.world, entry.run_id))
        assert row["code"] == "cut_off"
        with pytest.raises(errors.ServiceError):
            _answer(sock)
    served.quiet()
    assert leftovers(served.world) == []
    assert served.run(hello).error is None


def test_worker_serves_once_and_ends(served: Served, hello: Path) -> None:
    for _ in range(2):
        one = served.alone()
        assert served.run(hello).error is None
        _until_gone(one)
        assert served.alone() != one


def test_idle_worker_killed_takes_no_request_along(served: Served, hello: Path) -> None:
    one = served.alone()
    os.kill(one, signal.SIGKILL)
    _until_gone(one)
    assert served.run(hello).error is None
    assert served.alone() != one
    assert leftovers(served.world) == []


def test_keeper_that_waits_knows_configuration_that_holds(served: Served, hello: Path) -> None:
    settings = {"callers": [CALLER], "socket": str(served.path), "journal": False, "checkpoint_seconds": 0}
    says = "the self-test of the policy: off"
    for self_test in (True, False):  # the last is what the others here are served with
        served.quiet()
        before = served.waiting()
        served.world.configure(**settings, self_test=self_test)
        os.kill(served.pid, signal.SIGHUP)
        # The process with the earlier configuration ends, and serves no further request.
        for pid in before:
            _until_gone(pid)
        answer = served.run(hello)
        assert answer.error is None
        assert any(line.startswith(says) for line in answer.not_enforced) is not self_test


def test_keeper_that_waits_ends_with_supervisor_however_that_ends(tmp_path: Path, warm: Path) -> None:
    for ending in ("stop", "kill"):
        base = tmp_path / ending
        base.mkdir()
        with Served(World(base, warm=warm), on_supervisor_exit="continue") as one:
            with one.connected() as sock:
                client.ask(sock, "ps")
            one.quiet()
            waits = one.waiting()
            getattr(one, ending)()
            for pid in waits:
                _until_gone(pid)


def _until_gone(pid: int) -> None:
    def gone() -> bool:
        try:
            return serving.status(pid)["State"][0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    eventually(gone)


def test_process_holds_what_runs_need_and_no_more(served: Served, long: Path) -> None:
    kept = sum(1 << number for number in hardening.kept())
    own = int(serving.status(os.getpid())["CapEff"], 16)
    assert own & ~kept  # the control: root has more
    with serving.asked(served.path, long):
        entry = running(served.world, "long")
        (keeper,) = eventually(lambda: (found := served.children())[1:] == [] and found)
        (runsc, *_) = eventually(lambda: serving.children_of(keeper))
        for pid in (served.pid, keeper, runsc):
            held = serving.status(pid)
            assert [int(held[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")] == [kept] * 3, pid
            assert int(held["CapInh"], 16) == 0
            assert held["Seccomp"] == "2"
        spaces = {pid: os.readlink(f"/proc/{pid}/ns/net") for pid in (served.pid, keeper, os.getpid())}
        assert spaces[served.pid] == spaces[keeper] != spaces[os.getpid()]
        devices = Path(f"/proc/{served.pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] in ([], ["lo"])
        assert entry.run_id
    served.quiet()


def test_second_one_is_refused_and_first_goes_on(served: Served, hello: Path) -> None:
    second = Served(served.world)
    second.start(wait=False)
    assert second.process is not None
    assert second.process.wait(START) == 1
    assert "already_served" in second.log()
    assert served.run(hello).error is None


START = serving.START_SECONDS


def test_sighup_reads_who_may_ask_again(served: Served, hello: Path) -> None:
    served.world.configure(callers=[CALLER, STRANGER], socket=str(served.path), journal=False, checkpoint_seconds=0)
    os.kill(served.pid, signal.SIGHUP)
    served.run(hello)  # a turn later it has been read
    done = covenant("run", str(hello), "you", "--json", served=served, uid=STRANGER)
    assert done.returncode == 0, done.stdout
    (served.world.state / "config.toml").write_text("callers = 1\n")
    os.kill(served.pid, signal.SIGHUP)
    eventually(lambda: "stays as it was" in served.log())
    served.world.configure(callers=[CALLER], socket=str(served.path), journal=False, checkpoint_seconds=0)
    os.kill(served.pid, signal.SIGHUP)
    served.run(hello)
    done = covenant("run", str(hello), "you", "--json", served=served, uid=STRANGER)
    assert json.loads(done.stdout)["code"] == "not_a_caller"


def test_doctor_names_changed_configuration(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the fix that it names is applied; what counts from a restart alone is named after a reload too."""
    monkeypatch.setenv("COVENANT_HOME", str(served.world.home))
    monkeypatch.setenv("COVENANT_STATE", str(served.world.state))

    def stale() -> list[str]:
        return [check.mend for check in doctor.of_the_home() if check.name == "supervisor's files"]

    same = {"callers": [CALLER], "socket": str(served.path), "checkpoint_seconds": 0}
    assert stale() == []
    served.world.configure(**same, journal=False, request_seconds=20)
    (fix,) = stale()
    assert fix.startswith("systemctl reload covenant-supervisor")
    os.kill(served.pid, signal.SIGHUP)
    eventually(lambda: stale() == [])
    served.world.configure(**same, journal=True, request_seconds=20)
    os.kill(served.pid, signal.SIGHUP)
    eventually(lambda: "`journal` stays as it was" in served.log())
    (fix,) = stale()
    assert "restart it for socket, metrics, journal" in fix


def test_no_agent_is_caller(tmp_path: Path, warm: Path) -> None:
    """Neither by the range of the sandboxed (tests/unit/sandbox/test_config.py) nor as the user of trusted-local."""
    agents = Served(World(tmp_path, warm=warm), callers=[pwd.getpwnam("covenant-agent").pw_uid])
    agents.start(wait=False)
    assert agents.process is not None
    assert agents.process.wait(START) == 1
    assert "config_invalid" in agents.log()


@pytest.mark.parametrize("wanted", ["end", "continue"])
def test_runs_end_with_killed_supervisor_or_go_on_as_operator_says(wanted: str, tmp_path: Path, warm: Path) -> None:
    world = World(tmp_path, warm=warm)
    with Served(world, on_supervisor_exit=wanted) as served:
        package = world.sign(world.package({"main.py": LONG}, id="long", cpu_ms=60000 * SLOWNESS))
        with serving.asked(served.path, package) as sock:
            entry = running(world, "long")
            served.kill()
            if wanted == "end":
                (row,) = eventually(lambda: ended(world, entry.run_id))
                assert row["code"] == "stopped"
            # The socket of the dead one is still there, and the next supervisor replaces it.
            assert served.path.is_socket()
            served.start()
            if wanted == "continue":
                # The next one finds the run and can end it, and the dead one's client still gets the result.
                assert [one.run_id for one in live(world, "long")] == [entry.run_id]
                with served.connected() as other:
                    client.ask(other, "operate", operation="kill", run=entry.run_id)
                answer = RunResult.from_json(_answer(sock))
                assert answer.error is not None
                assert answer.error.code == "stopped"
        assert served.run(world.sign(world.copy("hello"))).error is None
        assert served.stop() == 0
        assert not served.path.exists()
    assert leftovers(world) == []


def test_systemd_gives_socket_and_is_told_that_it_is_ready(tmp_path: Path, warm: Path) -> None:
    world = World(tmp_path, warm=warm)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
    ):
        # The listener passes the socket as descriptor 3, and names the receiver (sd_listen_fds(3)).
        activate = f'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@" 3<&{listener.fileno()}'
        served = Served(world, before=["bash", "-c", activate, "bash"])
        listener.bind(str(served.path))
        listener.listen()
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(START)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        served.start(environment=environment, wait=False, fds=[listener.fileno()])
        said: set[bytes] = set()
        while not {b"READY=1", b"WATCHDOG=1"} <= said:
            said.add(notified.recv(100))
        with served.stopping():
            assert served.run(world.sign(world.copy("hello"))).error is None
        # The watchdog's messages are not read any more, and no process waits for that.
        assert served.process is not None
        assert served.process.returncode == 0
        # Not its own to take away.
        assert served.path.is_socket()
    assert leftovers(world) == []


def test_agent_with_network_reaches_uplink_of_host(tmp_path: Path, warm: Path) -> None:
    with internet.made() as net:
        world = internet.configured(internet.NetworkedWorld(tmp_path, warm=warm), net)
        grants = internet.entries(("93.184.216.34", "[80]", "tcp"), ("api.example.com", "[80]", "tcp"))
        probes = ["tcp('93.184.216.34', 80)", "tcp('api.example.com', 80, 10)", "tcp('9.9.9.9', 80)"]
        code = HEAD + internet.probes(probes) + TAIL
        package = world.sign(world.package({"main.py": code}, network="full", more=grants))
        host = f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}"
        settings = {"uplink": "eth0", "resolvers": [internet.RESOLVER]}
        with Served(world, before=["nsenter", host], **settings) as served:
            answer = served.run(package)
            assert answer.result is not None, (answer.error, answer.stderr)
            assert json.loads(answer.result.text) == ["connected", "connected", "ECONNREFUSED"]
            served.quiet()
            assert net.leftovers() == []
        assert leftovers(world) == []

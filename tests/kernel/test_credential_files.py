"""Secrets as files of $CREDENTIALS_DIRECTORY: there from the start, the run's own, read-only, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.broker import credentials
from sandbox.kernel.fs.secret_files import SecretFiles
from sandbox.shim import control_socket
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import live, until
from tests.kernel.test_credentials import ASK, PLANTED, run, vault
from tests.kernel.world import World

FILES = '[permissions.credentials]\ngrants = ["db", "missing"]\nfiles = true\n'
LOOK = """
import os, stat
place = os.environ.get("CREDENTIALS_DIRECTORY")
def tried(call):
    try:
        return call()
    except OSError as e:
        return type(e).__name__ + " " + str(e.errno)
def opened(path, flags, data=b"x"):
    fd = os.open(path, flags, 0o600)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
def mode(path):
    return oct(stat.S_IMODE(os.stat(path).st_mode))
"""
CODE = """
answer = {
    "place": place,
    "names": sorted(os.listdir(place)),
    "db": open(place + "/db").read(),
    "modes": [mode(place), mode(place + "/db")],
    "mine": os.stat(place + "/db").st_uid == os.getuid(),
    "write": tried(lambda: opened(place + "/db", os.O_WRONLY)),
    "chmod": tried(lambda: os.chmod(place + "/db", 0o700)),
    "make": tried(lambda: opened(place + "/more", os.O_CREAT | os.O_WRONLY)),
    "remove": tried(lambda: os.unlink(place + "/db")),
    "run": sorted(os.listdir("/run")),
    "broker": ask(kind="credential", name="db", token=ask(kind="token")["ok"]["token"])["ok"]["value"],
}
"""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[World]:
    base = tmp_path_factory.mktemp("files")
    world = World(base, warm=warm)
    _with_vault(world)
    vault(world, "init")
    vault(world, "put", "probe", "db", secret=PLANTED + "\n")
    vault(world, "put", "probe", "other", secret="not granted to it")
    yield world
    assert leftovers(world) == []


def _with_vault(world: World) -> None:
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{world.base}/vault.key"\n')


def test_what_is_granted_and_there_is_file_and_nothing_else(keyed: World) -> None:
    answer, rows = run(keyed, LOOK + CODE, more=FILES)
    assert answer == {
        "place": "/run/credentials",
        "names": ["db"],
        "db": PLANTED,
        "modes": ["0o500", "0o400"],
        "mine": True,
        "write": "PermissionError 13",
        "chmod": "OSError 30",
        "make": "PermissionError 13",
        "remove": "PermissionError 13",
        "run": ["covenant", "credentials"],
        "broker": PLANTED,
    }
    given = [row for row in rows if row["type"] == "credential_granted"]
    assert [(row["name"], row["version"]) for row in given] == [("db", 1), ("db", 1)], (
        "the file, and the broker's answer"
    )
    order = [row["type"] for row in rows]
    assert order.index("run_started") < order.index("credential_granted")
    denied = [(row["target"], row["code"]) for row in rows if row["type"] == "denied"]
    assert ("missing", "absent") in denied


def test_without_word_there_is_no_file(keyed: World) -> None:
    """The control: the same grant without `files`."""
    answer, _ = run(keyed, LOOK + "answer = [place, os.listdir('/run')]\n", more=FILES.replace("files = true\n", ""))
    assert answer == [None, ["covenant"]]


def test_secret_lies_nowhere_on_host(keyed: World) -> None:
    """Neither in a file below the state, nor in a mount of the host's, while the agent reads it and afterwards."""
    secret = PLANTED.split()[0].encode()
    with live(keyed, more=FILES) as one:
        time.sleep(0.5)
        assert one.report().holds
        assert "/run/credentials" in one.made.mounts, (
            "what lies there is attested as every other mount (test_attest.py)"
        )
        mounts = Path("/proc/self/mountinfo").read_text()
        assert "/run/credentials" not in mounts
        found = [p for p in keyed.base.rglob("*") if p.is_file() and p.name != "vault" and _holds(p, secret)]
        assert found == []
        assert any("/run/credentials" in line for line in _mounts(one.family().gofer.name.pid)), "the control"


def _holds(path: Path, secret: bytes) -> bool:
    try:
        return secret in path.read_bytes()
    except OSError:
        return False


def _mounts(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/mountinfo").read_text().splitlines()


def test_served_run_has_them_as_well(keyed: World) -> None:
    """Under the supervisor's own filter and bounded rights."""
    package = keyed.sign(keyed.package({"main.py": _main("answer = open(place + '/db').read()")}, more=FILES))
    ready = serving.Served(keyed)
    _with_vault(keyed)
    with ready as served:
        answer = served.run(package)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert json.loads(answer.result.text) == PLANTED


def _main(code: str) -> str:
    from tests.kernel.world import HEAD, TAIL

    return HEAD + ASK + LOOK + code + "\n" + TAIL


def test_with_standby_it_is_refused(keyed: World) -> None:
    package = keyed.sign(keyed.package({"main.py": "pass\n"}, more="standby = 1\n" + FILES))
    answer = None
    with pytest.raises(errors.NotEnforceableError, match="standby"):
        answer = keyed.run(package)
    assert answer is None


class Slow:
    """A vault that has the first question answered at once, and takes its time for a secret."""

    name = "openbao"

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[None]:
        if name:
            time.sleep(3600)
        yield None


def test_vault_that_takes_its_time_keeps_nobody_from_ending_run(keyed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    config = keyed.state / "config.toml"
    before = config.read_text()
    monkeypatch.setattr(credentials, "configured", lambda config: Slow())
    lines = 'backend = "openbao"\naddress = "https://127.0.0.1:1"\ntoken = "/nowhere"\nca = "/nowhere"\n'
    config.write_text(f"start_deadline_seconds = 300\nself_test = false\n[vault]\n{lines}timeout_seconds = 60\n")
    package = keyed.sign(keyed.package({"main.py": _main("answer = 1")}, more=FILES))
    said: list[BaseException] = []

    def asks() -> None:
        try:
            keyed.run(package)
        except errors.CovenantError as e:
            said.append(e)

    thread = threading.Thread(target=asks)
    thread.start()
    try:
        runs = keyed.state / "runs"
        (place,) = until(lambda: list(runs.glob("*/control")))
        until(lambda: _heard(place.parent) == {"state": "Isolated"})
        assert control_socket.ask(place.parent, "logs")["text"] == ""
        with pytest.raises(errors.WrongStateError):
            control_socket.ask(place.parent, "suspend")
        assert control_socket.ask(place.parent, "kill", reason="enough")["state"] == "Terminated"
    finally:
        thread.join(300)
        config.write_text(before)
    assert [type(one) for one in said] == [errors.KilledError]
    assert "enough" in str(said[0])
    kinds = [row["kind"] for row in keyed.rows() if row["kind"].get("run_id") == place.parent.name]
    assert [row["code"] for row in kinds if row["type"] == "run_ended"] == ["stopped"]


def _heard(directory: Path) -> dict[str, object] | None:
    """Return the state that the run reports, once it listens."""
    try:
        return control_socket.ask(directory, "state")
    except errors.NoRunError:
        return None


def test_file_system_is_users_own_and_sealed() -> None:
    with SecretFiles(64_321) as made:
        made.put("one", memoryview(b"secret"))
        made.seal()
        info = Path(f"/proc/self/fd/{made.fd}/one").stat()
        assert (info.st_uid, info.st_gid, info.st_mode & 0o777) == (64_321, 64_321, 0o400)
        with pytest.raises(errors.KernelError):
            made.put("two", memoryview(b"x"))

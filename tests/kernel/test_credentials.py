"""Secrets as an agent under gVisor gets them, and where they are not: one sandbox, many requests.

What is refused has its control beside it: the same request, with the name or the token that it lacks, is answered.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.broker import credentials
from sandbox.rundir import registry
from sandbox.vault.openbao import OpenBao
from tests.kernel import families, openbao_server, serving
from tests.kernel.conftest import leftovers
from tests.kernel.world import HEAD, ROOT, TAIL, World

PAGE = os.sysconf("SC_PAGE_SIZE")
PLANTED = 'planted-secret "with quotes" \\ and ümlauts\n\tand a line'
GRANTS = '[permissions.credentials]\ngrants = ["db", "missing"]\n'
ASK = """
import socket
broker = socket.socket(fileno=3)
lines = broker.makefile("rb")
count = 0
def ask(**fields):
    global count
    count += 1
    broker.sendall(json.dumps({"id": count, **fields}).encode() + b"\\n")
    said = json.loads(lines.readline())
    assert said.pop("id") == count
    return said
def refused(said):
    return list(said) == ["error"] and said["error"]
"""


def vault(world: World, *words: str, secret: str = "") -> dict[str, Any]:
    """``covenant vault``, as an operator types it, with a secret on stdin."""
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "covenant", "vault", *words, "--json"],
        env=environment,
        input=secret.encode(),
        capture_output=True,
        check=False,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert done.returncode == 0, document
    assert isinstance(document, dict)
    return document


def covenant(world: World, *words: str) -> subprocess.CompletedProcess[bytes]:
    """One command in a process of its own."""
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", *words]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[World]:
    """A world with a vault that holds secrets of two agents."""
    base = tmp_path_factory.mktemp("credentials")
    world = World(base, warm=warm)
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{base}/vault.key"\n')
    vault(world, "init")
    vault(world, "put", "probe", "db", secret=PLANTED + "\n")
    vault(world, "put", "probe", "other", secret="not granted to it")
    vault(world, "put", "another", "db", secret="another agent's")
    yield world
    assert leftovers(world) == []


def run(world: World, code: str, *, more: str = GRANTS, **fields: Any) -> tuple[Any, Sequence[dict[str, Any]]]:
    """Return the agent's answer and the rows of its run."""
    before = len(world.rows())
    answer = world.run_code(HEAD + ASK + code + TAIL, more=more, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    return json.loads(answer.result.text), [row["kind"] for row in world.rows()[before:]]


def test_granted_secret_and_nothing_else(keyed: World) -> None:
    code = """
first = ask(kind="token")
token = first["ok"]["token"]
answer = {
    "token": sorted(first["ok"]),
    "db": ask(kind="credential", name="db", token=token),
    "again": ask(kind="token"),
    "no_token": ask(kind="credential", name="db"),
    "wrong": ask(kind="credential", name="db", token=token[:-1] + ("A" if token[-1] != "A" else "B")),
    "more": ask(kind="credential", name="db", token=token, agent_id="another"),
    "other": ask(kind="credential", name="other", token=token),
    "missing": ask(kind="credential", name="missing", token=token),
    "list": ask(kind="credentials", token=token),
    "odd": [ask(kind="credential", name=name, token=token) for name in ("db\\0", "", "d\\u0431", "../db", ["db"], 7)],
    "still": ask(kind="credential", name="db", token=token),
    "environment": sorted(os.environ),
}
import time
before = time.monotonic()
one = {"kind": "credential", "name": "db", "token": token}
broker.sendall(b"".join(json.dumps({"id": 1000 + n, **one}).encode() + b"\\n" for n in range(200)))
said = [json.loads(lines.readline()) for _ in range(200)]
codes = [one["error"]["code"] if "error" in one else "ok" for one in said]
answer["flood"] = [codes.count("ok"), codes.count("too_many_requests"), time.monotonic() - before]
time.sleep(1.2)
answer["after"] = ask(kind="credential", name="db", token=token)
"""
    found, rows = run(keyed, code)
    assert found["token"] == ["expires_ms", "token"]
    assert found["db"] == found["still"] == {"ok": {"version": 1, "value": PLANTED}}
    constant = {"error": {"code": "credential_refused", "message": "this credential is not available"}}
    for name in ("again", "no_token", "wrong", "more", "other", "missing"):
        assert found[name] == constant, name
    assert found["odd"] == [constant] * 6
    assert found["list"]["error"]["code"] == "unknown_kind"
    assert not [name for name in found["environment"] if "CRED" in name or "TOKEN" in name]
    given, refused, seconds = found["flood"]
    assert given + refused == 200
    assert given <= credentials.BURST + seconds * credentials.PER_SECOND + 1
    assert found["after"] == found["db"]
    grants = [row for row in rows if row["type"] == "credential_granted"]
    assert [(row["name"], row["version"], row["agent_id"], row["backend"]) for row in grants] == [
        ("db", 1, "probe", "file")
    ] * (3 + given)
    denied = {(row["target"], row["code"]) for row in rows if row.get("layer") == "credential"}
    causes = {("other", "not_granted"), ("missing", "absent"), ("", "malformed"), ("", "rate")}
    assert denied == {("", "token"), ("db", "token"), *causes}


# --- where a secret is not --------------------------------------------------------------------------------------

# Asks until the secret changes, so that the test says when it may end; then answers with the old one.
UNTIL_ROTATED = """
import time
token = ask(kind="token")["ok"]["token"]
answer = [ask(kind="credential", name="db", token=token)]
print("on stderr there is no secret", file=sys.stderr)
while answer[-1] == answer[0]:
    time.sleep(0.3)
    answer.append(ask(kind="credential", name="db", token=token))
    del answer[1:-1]
"""


@contextlib.contextmanager
def running(world: World, code: str, **fields: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``covenant run`` in a process of its own, once its agent has been given a secret."""
    path = world.sign(world.package({"main.py": HEAD + ASK + code + TAIL}, **fields))
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    before = len(granted(world))
    child = subprocess.Popen(
        [sys.executable, "-m", "covenant", "run", str(path), "hi", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until = time.monotonic() + 60
        while len(granted(world)) == before:
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < until, "nothing was granted"
            time.sleep(0.02)
        yield child
    finally:
        child.kill()
        child.communicate()


def granted(world: World) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == "credential_granted"]


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline", "status"))
    return b""


def memory(pid: int) -> Iterator[bytes]:
    """Yield the writable memory of a process by runs of present pages (proc_pid_pagemap(5)); none if it has ended.

    A read of an absent page of shared memory would make it, and its owner would be killed for the size.
    """
    with contextlib.ExitStack() as stack:
        try:
            stream, pages = (
                stack.enter_context(open(f"/proc/{pid}/{name}", "rb", buffering=0)) for name in ("mem", "pagemap")
            )
            regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return
        for line in regions:
            place, rights, *_ = line.split()
            begin, end = (int(part, 16) // PAGE for part in place.split("-"))
            if rights.startswith("rw"):
                flags = memoryview(os.pread(pages.fileno(), 8 * (end - begin), 8 * begin)).cast("Q")
                for first, count in there(flags):
                    with contextlib.suppress(OSError):
                        yield os.pread(stream.fileno(), PAGE * count, PAGE * (begin + first))


def there(flags: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The runs of pages that are in memory or swapped out: the first, and how many."""
    for is_there, run in itertools.groupby(enumerate(flags), key=lambda page: page[1] >> 62 != 0):
        numbers = [number for number, _ in run]
        if is_there:
            yield numbers[0], len(numbers)


def lying(base: Path, needles: Sequence[bytes]) -> list[str]:
    """The files below a directory that hold one of these."""
    found = []
    for path in base.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.is_relative_to(base / "supervisor/rootfs"):
            content = path.read_bytes()
            found += [str(path) for needle in needles if needle in content]
    return found


def test_secret_is_with_agent_and_nowhere_else(keyed: World) -> None:
    secret = f"planted-{os.urandom(12).hex()}"
    vault(keyed, "put", "seen", "db", secret=secret)
    needles = [secret.encode(), secret.encode().hex().encode(), base64.b64encode(secret.encode())]
    with running(keyed, UNTIL_ROTATED, id="seen", name="seen", more=GRANTS) as child:
        everything = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        told = [pid for pid in everything if any(needle in words(pid) for needle in needles)]
        assert told == []
        assert lying(keyed.base, needles) == []
        (keeper,) = [entry.keeper for entry in registry.live(keyed.state / "runs")]
        others = [pid for pid in family(child.pid) if pid != keeper]
        # The control: a memory in which it is, read by the same means.
        assert any(secret.encode() in region for pid in others for region in memory(pid)), "nobody has it"
        assert [needle for region in memory(keeper) for needle in needles if needle in region] == []
        limits = Path(f"/proc/{keeper}/limits").read_text()
        assert [line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core")] == [["1", "1"]]
        # Root can read back a process that its own uid may not trace.
        assert covenant(keyed, "attest", "--all", "--json").returncode == 0
        vault(keyed, "rotate", "seen", "db", secret="go on")
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0, (out, err)
    document = json.loads(out)
    first, last = json.loads(document["text"])
    assert (first["ok"], last["ok"]) == ({"version": 1, "value": secret}, {"version": 2, "value": "go on"})
    assert b"on stderr there is no secret" in err
    assert lying(keyed.base, needles) == []
    assert secret.encode() not in err


def test_what_is_removed_is_refused_at_once(keyed: World) -> None:
    vault(keyed, "put", "cut", "db", secret="first")
    with running(keyed, UNTIL_ROTATED, id="cut", name="cut", more=GRANTS) as child:
        vault(keyed, "rm", "cut", "db")
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0, (out, err)
    first, last = json.loads(json.loads(out)["text"])
    assert (first["ok"]["value"], last["error"]["code"]) == ("first", "credential_refused")
    assert [row for row in keyed.rows() if row["kind"].get("code") == "absent" and row["kind"]["agent_id"] == "cut"]


def test_run_without_grant_has_no_broker_and_one_by_dev_no_secret(keyed: World) -> None:
    found, _ = run(keyed, "answer = 'unreached'", more=GRANTS)
    assert found == "unreached"
    code = """
try:
    os.fstat(3)
    answer = "there"
except OSError as e:
    answer = e.errno
"""
    assert keyed.ask(code) == errno.EBADF
    path = keyed.package({"main.py": HEAD + TAIL}, name="dev", id="probe", more=GRANTS)
    done = covenant(keyed, "dev", str(path), "hi", "--json")
    assert "given no secret" in json.loads(done.stdout)["message"]


def test_broker_for_secrets_starts_no_agent(keyed: World) -> None:
    """It is there by the grant of a secret, and answers nothing of what another grant is for."""
    families.member(keyed, "leaf", "answer = 1", **families.SMALL)
    code = """
token = ask("token")["ok"]["token"]
answer = [ask("credential", name="db", token=token), child("leaf"), ask("wait", run="0" * 36)]
"""
    fields: dict[str, Any] = {**families.BIG, "id": "probe"}
    before = len(keyed.rows())
    secret, *refused = families.answered(keyed, families.member(keyed, "lone", code, more=GRANTS, **fields))
    assert secret["ok"]["value"] == PLANTED
    assert [said["error"]["code"] for said in refused] == ["unknown_kind"] * 2
    assert "leaf" not in [row["kind"].get("agent_id") for row in keyed.rows()[before:]]
    # The control: the same agent with the other grant as well.
    path = families.member(keyed, "lone", code, more=GRANTS + families.spawn(), **fields)
    secret, leaf, none = families.answered(keyed, path)
    assert (secret["ok"]["value"], leaf["ok"]["text"], none["error"]["code"]) == (PLANTED, "1", "unknown_run")


def test_vault_that_cannot_be_opened_starts_nothing(keyed: World) -> None:
    key = keyed.base / "vault.key"
    key.chmod(0o640)
    try:
        with pytest.raises(errors.VaultKeyError, match="is not private"):
            keyed.run_code(HEAD + TAIL, more=GRANTS)
    finally:
        key.chmod(0o400)
    row = keyed.rows()[-1]["kind"]
    assert (row["type"], row["code"], row["grant"]) == (
        "manifest_rejected", "vault_locked", "permissions.credentials.grants",
    )  # fmt: skip


# --- the second backend ------------------------------------------------------------------------------------------


def test_openbao_gives_agent_its_secrets_and_never_hears_of_it(keyed: World, tmp_path: Path) -> None:
    """The agent has no network at all; the supervisor's token may only read."""
    text = (keyed.state / "config.toml").read_text()
    with openbao_server.running(tmp_path) as server:
        settings = server.settings
        token = server.token("reads", openbao_server.READ_ONLY)
        lines = (
            'backend = "openbao"',
            f'address = "{settings.address}"',
            f'token = "{token}"',
            f'ca = "{settings.ca}"',
        )
        (keyed.state / "config.toml").write_text(text.partition("[vault]")[0] + "[vault]\n" + "\n".join(lines) + "\n")
        try:
            OpenBao(settings).put("probe", "db", memoryview(PLANTED.encode()), before=lambda change: None)
            code = """
token = ask(kind="token")["ok"]["token"]
answer = [ask(kind="credential", name=name, token=token) for name in ("db", "missing", "other")]
answer.append([line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]])
"""
            (db, missing, other, devices), rows = run(keyed, code)
            assert db == {"ok": {"version": 1, "value": PLANTED}}
            assert missing == other == {"error": {"code": "credential_refused", "message": missing["error"]["message"]}}
            assert devices == ["lo"]
            assert [row["backend"] for row in rows if row["type"] == "credential_granted"] == ["openbao"]
            server.stop()
            with pytest.raises(errors.VaultError, match="cannot be used"):
                keyed.run_code(HEAD + TAIL, more=GRANTS)
        finally:
            (keyed.state / "config.toml").write_text(text)


# --- by the supervisor -------------------------------------------------------------------------------------------

FETCH = """
token = ask(kind="token")["ok"]["token"]
answer = ask(kind="credential", name="db", token=token)
"""


def test_supervisor_that_gave_its_rights_up_hands_out_secrets_too(warm: Path) -> None:
    """By a credential of its unit, and then by OpenBao, for which its keepers alone return to the host's network."""
    with serving.open_place() as base, contextlib.ExitStack() as stack:
        world = World(base, warm=warm)
        served = serving.Served(world)
        config = world.state / "config.toml"
        plain = config.read_text()
        config.write_text(plain + f'[vault]\nkey = "{base}/vault.key"\n')
        vault(world, "init")
        vault(world, "put", "probe", "db", secret="by systemd")
        given = base / "credentials"
        given.mkdir(mode=0o700)
        (base / "vault.key").rename(given / "covenant-vault")
        config.write_text(plain + '[vault]\nkey = "credential:covenant-vault"\n')
        package = world.sign(world.package({"main.py": HEAD + ASK + FETCH + TAIL}, more=GRANTS))
        with served.stopping():
            served.start(environment={"CREDENTIALS_DIRECTORY": str(given)})
            assert secret_of(served.run(package)) == "by systemd"
            (given / "covenant-vault").rename(base / "vault.key")
            with pytest.raises(errors.VaultKeyError):
                served.run(package)
        server = stack.enter_context(openbao_server.running(base))
        OpenBao(server.settings).put("probe", "db", memoryview(b"by OpenBao"), before=lambda change: None)
        lines = (f'{name} = "{getattr(server.settings, name)}"' for name in ("backend", "address", "token", "ca"))
        config.write_text(plain + "[vault]\n" + "\n".join(lines) + "\n")
        with served.stopping():
            served.start()
            assert secret_of(served.run(package)) == "by OpenBao"
        assert leftovers(world) == []


def secret_of(answer: Any) -> str:
    assert answer.error is None, answer
    return str(json.loads(answer.result.text)["ok"]["value"])


# --- children ----------------------------------------------------------------------------------------------------


def test_child_has_names_of_both_and_its_own_secrets_under_them(keyed: World) -> None:
    """And neither has the other's token."""
    for agent, name in (
        ("boss", "db"),
        ("boss", "of-boss"),
        ("child", "db"),
        ("child", "of-boss"),
        ("child", "of-child"),
    ):
        vault(keyed, "put", agent, name, secret=f"{name} of {agent}")
    names = '[permissions.credentials]\ngrants = ["db", "{}"]\n'
    asks = """
token = ask("token")["ok"]["token"]
given = json.loads(intent["text"]) if intent["text"] != "hi" else []
answer = {name: ask("credential", name=name, token=token) for name in ("db", "of-boss", "of-child")}
"""
    child = asks + 'answer["by the other token"] = ask("credential", name="db", token=given[0])\n'
    boss = asks + 'answer["child"] = child("child", json.dumps([token]), on_excess="narrow")\n'
    families.member(keyed, "child", child, more=names.format("of-child"), **families.SMALL)
    path = families.member(keyed, "boss", boss, more=names.format("of-boss") + families.spawn(), **families.BIG)
    found = families.answered(keyed, path)
    below = json.loads(found.pop("child")["ok"]["text"])
    assert {name: said["ok"]["value"] for name, said in found.items() if "ok" in said} == {
        "db": "db of boss", "of-boss": "of-boss of boss",
    }  # fmt: skip
    assert {name: said["ok"]["value"] for name, said in below.items() if "ok" in said} == {"db": "db of child"}
    refused = {said["error"]["code"] for said in (*found.values(), *below.values()) if "error" in said}
    assert refused == {"credential_refused"}

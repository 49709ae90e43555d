"""Secrets as an agent under gVisor gets them, and where they are not: one sandbox, many requests.

What is refused has its control beside it: the same request, with the name or the token that it lacks, is answered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.world import HEAD, ROOT, TAIL, World

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
    """What the agent answered, and the rows of its run."""
    before = len(world.rows())
    answer = world.run_code(HEAD + ASK + code + TAIL, more=more, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    return json.loads(answer.result.text), [row["kind"] for row in world.rows()[before:]]


def test_a_granted_secret_and_nothing_else(keyed: World) -> None:
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
"""
    found, rows = run(keyed, code)
    assert found["token"] == ["expires_ms", "token"]
    assert found["db"] == found["still"] == {"ok": {"version": 1, "value": PLANTED}}
    constant = {"error": {"code": "credential_refused", "message": "this credential is not available"}}
    for name in ("again", "no_token", "wrong", "more", "other", "missing"):
        assert found[name] == constant, name
    assert found["odd"] == [constant] * 6
    assert found["list"]["error"]["code"] == "unknown_kind"
    grants = [row for row in rows if row["type"] == "credential_granted"]
    assert [(row["name"], row["version"], row["agent_id"], row["backend"]) for row in grants] == [
        ("db", 1, "probe", "file")
    ] * 2
    denied = {(row["target"], row["code"]) for row in rows if row.get("layer") == "credential"}
    assert denied == {
        ("", "token"), ("db", "token"), ("other", "not_granted"), ("missing", "absent"), ("", "malformed"),
    }  # fmt: skip

"""A call of a tool that an operator is asked about waits at the tool gate until it is granted or denied."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli import main
from policy import errors
from policy.leases import targets
from policy.manifest import parse
from policy.manifest.tools import command
from policy.rules import tool_calls
from policy.signing import keyfile
from tests.kernel import families
from tests.kernel.conftest import leftovers
from tests.kernel.test_approvals import Answer, Operator
from tests.kernel.test_tool_servers import SCHEMA, package, server
from tests.kernel.test_tools_endpoint import AGENT, request, text_of
from tests.kernel.world import ROOT as REPOSITORY
from tests.kernel.world import World
from tests.signing_kit import MANIFEST

TOOL = "matrix://tool/mcp/mail/send@1.2.0"
PAGE = (REPOSITORY / "docs" / "approvals.md").read_text()
GRANTS = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if TOOL in block)
SECTION = PAGE[PAGE.index("## Calls of tools") : PAGE.index("## Requests with a secret")]
(SHELL,) = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
ONCE, SAME, ANY, DENY = (shlex.split(line, comments=True)[1:] for line in SHELL.splitlines())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("asked"), warm=warm)
    (made.home / "keys").mkdir(mode=0o700)
    key = made.home / "keys" / "ann.key"
    key.write_bytes(keyfile.plain(made.key))
    key.chmod(0o600)
    yield made
    assert leftovers(made) == []


def packaged(world: World, tmp: Path) -> Path:
    tool = {"name": "send", "description": "Send it", "input_schema": SCHEMA, "side_effect_class": "network"}
    advertised = [{"name": "send", "description": "Send it", "inputSchema": SCHEMA}]
    made = package(tmp, server(advertised), "\n" + GRANTS, alias="mail", version="1.2.0", tools=[tool])
    document = json.loads((made / "tools.json").read_text())
    (made / "tools.json").write_text(json.dumps({**document, "allowed_side_effects": ["network"]}))
    (made / "main.py").write_text(AGENT)
    manifest = (made / "agent.toml").read_text()
    (made / "agent.toml").write_text(manifest.replace("[resources]", "[resources]\ncpu_ms_per_task = 90000"))
    return world.sign(made)


def call(text: Any) -> list[Any]:
    return ["/mcp", request("tools/call", name="mail__send", arguments={"text": text})]


def target(text: str) -> str:
    return targets.call(TOOL, hashlib.sha256(tool_calls.encoded({"text": text})).hexdigest())


def attacked(operator: Operator, held: Any) -> None:
    """Every lease that is not for this call is refused."""
    for kind, lease in (
        (errors.LeaseError, operator.lease(held, 60, target=target("another text"))),
        (errors.LeaseError, operator.lease(held, 60, "once", target=TOOL)),
        (errors.LeaseError, operator.lease(held, 60, target="matrix://tool/mcp/mail/delete@1.2.0")),
        (errors.LeaseError, operator.lease(held, 60, kind="network", target="api.example.com")),
        (errors.LeaseError, operator.lease(held, 60, run_id="0" * 32)),
        (errors.UnknownKeyError, operator.lease(held, 60, key=Ed25519PrivateKey.generate())),
        (errors.ExpiredError, operator.lease(held, -1)),
    ):
        with pytest.raises(kind):
            operator.grant(held, lease)


def covenant(*words: str) -> str:
    done = CliRunner().invoke(main.cli, list(words))
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


def test_operator_answers_calls_of_a_tool(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the entry and the commands of docs/approvals.md."""
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    world.configure(ask_operators=True, attest_seconds=1)
    listed: list[str] = []

    def typed(words: list[str]) -> Answer:
        def act(operator: Operator, held: Any) -> None:
            attacked(operator, held)
            listed.append(covenant("approvals", "list"))
            covenant(*(held["id"][:4] if word == "7b1e" else word for word in words))

        return act

    answers = {
        target("first secret\x1b[2J"): [typed(ONCE), typed(DENY)],
        target("same"): [typed(SAME)],
        target("any"): [typed(ANY)],
    }
    texts = ["first secret\x1b[2J"] * 3 + ["same", "same", 5, "any", "free"]
    before = len(world.rows())
    waits: list[Mapping[str, Any]] = []
    with Operator(world, answers) as operator:
        whole = json.dumps([call(text) for text in texts])
        answer = world.run(packaged(world, tmp_path), whole, asks=waits.append)
    assert not operator.failed, operator.failed
    assert answer.result is not None, (answer.error, answer.stderr)
    said = [text_of(reply) for reply in json.loads(answer.result.text)]
    assert [said[at] for at in (0, 3, 4, 6, 7)] == ["FIRST SECRET\x1b[2J", "SAME", "SAME", "ANY", "FREE"]
    assert all("needs an operator" in said[at] for at in (1, 2)), said
    assert "not fit" in said[5] or "string" in said[5]
    # The operator sees the arguments, escaped; the log has their digest.
    assert "network" in listed[0]
    assert '{"text":"first secret\\u001b[2J"}' in listed[0]
    rows = [row["kind"] for row in world.rows()[before:]]
    assert "first secret" not in json.dumps([row for row in rows if row["type"].startswith(("appr", "tool", "denied"))])
    told = [(row["type"], row.get("target"), row.get("code")) for row in rows if "approval" in row["type"]]
    once, same, any_ = (target(text) for text in ("first secret\x1b[2J", "same", "any"))
    assert told == [
        ("approval_asked", once, None), ("approval_granted", once, None),
        ("approval_asked", once, None), ("approval_denied", once, "denied"),
        ("approval_asked", same, None), ("approval_granted", same, None),
        ("approval_asked", any_, None), ("approval_granted", TOOL, None),
    ]  # fmt: skip
    # The client of the run is told of each, so that it does not take the run for one that hangs.
    assert [(held["asks"], held["target"]) for held in waits] == [("tool", one) for one in (once, once, same, any_)]
    kinds = [row["type"] for row in rows if row["type"] in ("tool_called", "lease_ended")]
    assert kinds == ["lease_ended", *["tool_called"] * 5], "a lease for one use is used up before the call"
    assert {row["code"] for row in rows if row["type"] == "tool_refused"} == {"not_approved", "schema"}
    assert not [row for row in rows if row["type"] == "drift"]
    exported = covenant("approvals", "export", answer.run_id[:8])
    assert "by tester" in exported
    without = parse.parse(MANIFEST + exported.encode()).permissions.skills
    assert (without.allow, without.side_effects, without.ask) == ((TOOL,), ("network",), ())


COMMAND = """\
[spawn]
allowed = true
max_depth = 1
max_descendants = 1
[permissions.skills]
side_effects = ["shell"]
[permissions.executables]
allow = ["/usr/bin/env"]
[[tools.command]]
name = "say"
agent = "sayer"
ask = true
[[tools.command.rule]]
argument = "1"
matches = "[a-z]+"
"""
CALLS = """
import subprocess
def say(word):
    done = subprocess.run(["say", word], input=b"given", capture_output=True)
    return [done.returncode, done.stdout.decode(), b"needs an operator" in done.stderr]
answer = [say("yes"), say("no"), say("NEVER")]
"""


def test_operator_answers_calls_of_a_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    world.configure(ask_operators=True)
    code = "import sys\nprint(sys.argv[1], sys.stdin.read())\n"
    stdio = '[process]\ncontract = "stdio"\n'
    world.sign(world.package({"main.py": code}, name="sayer", id="sayer", more=stdio, **families.SMALL))
    before = len(world.rows())

    def target_of(word: str) -> str:
        raw = tool_calls.encoded({"argv": [word], "stdin": base64.b64encode(b"given").decode()})
        return targets.call(command.uri("say", "sayer"), hashlib.sha256(raw).hexdigest())

    def granted(operator: Operator, held: Any) -> None:
        assert '{"argv": ["yes"], "stdin": "given"}' in covenant("approvals", "list")
        covenant("approvals", "grant", held["id"], "--once", "--key", "ann")

    answers: dict[str, list[Answer]] = {
        target_of("yes"): [granted],
        target_of("no"): [lambda operator, held: covenant("approvals", "deny", held["id"])],
    }
    with Operator(world, answers) as operator:
        found = families.answered(world, families.member(world, "top", CALLS, more=COMMAND, **families.BIG))
    assert not operator.failed, operator.failed
    assert found[0] == [0, "yes given\n", False]
    assert (found[1][1:], found[2][1:]) == (["", True], ["", False])
    kinds = [row["kind"]["type"] for row in world.rows()[before:]]
    assert [kinds.count(kind) for kind in ("approval_asked", "tool_called", "tool_refused")] == [2, 1, 2]


def test_unattended_tool_is_denied_at_once(world: World, tmp_path: Path) -> None:
    world.configure()
    before = len(world.rows())
    answer = world.run(packaged(world, tmp_path), json.dumps([call("free")]))
    assert answer.result is not None, (answer.error, answer.stderr)
    (reply,) = json.loads(answer.result.text)
    assert "needs an operator" in text_of(reply)
    rows = [row["kind"]["type"] for row in world.rows()[before:]]
    assert "approval_asked" not in rows
    assert "tool_called" not in rows

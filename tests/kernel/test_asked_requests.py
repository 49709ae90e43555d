"""A request to which the gate adds a secret waits there until an operator grants or denies it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli import main
from policy import errors
from policy.leases import targets
from policy.signing import keyfile
from tests.kernel import internet
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.injecting import InjectWorld, carried, host, net, opened, run
from tests.kernel.test_approvals import Answer, Operator
from tests.kernel.world import ROOT as REPOSITORY

__all__ = ["host", "net"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path, net: Any) -> Iterator[InjectWorld]:
    """Where a lease that has ended is noticed within a second."""
    with opened(tmp_path_factory.mktemp("asked"), warm, net, ask_operators=True, attest_seconds=1) as made:
        yield made


PAGE = (REPOSITORY / "docs" / "approvals.md").read_text()
SECTION = PAGE[PAGE.index("## Requests with a secret") : PAGE.index("## Not held")]
(GRANTS,) = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)
(SHELL,) = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
ONCE, SAME, ANY, UNTIL, DENY = (shlex.split(line, comments=True)[1:] for line in SHELL.splitlines())
URL = "https://api.example.com"
CODE = """
def post(path, body, **more):
    return ask("POST", path, body, more)
drip = raw("GET", "/drip")
lines = 0
while drip.readline():  # of 600
    lines += 1
answer = [lines, post("/taken", "first"), post("/taken", "first"), post("/taken?q=1", "same"),
    post("/taken?q=1", "same"), post("/hook/any", "a"), post("/hook/any", "b"), ask("GET", "/user"),
    ask("POST", "/taken", iter([b"a"])),
    ask("PUT", "/repos/../user"), ask("POST", "/taken", None, {"Content-Length": "131072"})]
"""


def covenant(*words: str) -> str:
    done = CliRunner().invoke(main.cli, list(words))
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


def attacked(operator: Operator, held: Any) -> None:
    """Every lease that is not for this request is refused."""
    head, other = targets.tool(held["target"]), hashlib.sha256(b"another").hexdigest()
    assert head is not None
    for kind, lease in (
        (errors.LeaseError, operator.lease(held, 60, target=targets.call(head, other))),
        (errors.LeaseError, operator.lease(held, 60, "once", target=head)),
        (errors.LeaseError, operator.lease(held, 60, target=f"POST {URL}/*")),
        (errors.LeaseError, operator.lease(held, 60, target=f"DELETE {URL}/taken")),
        (errors.LeaseError, operator.lease(held, 60, kind="tool")),
        (errors.LeaseError, operator.lease(held, 60, run_id="0" * 32)),
        (errors.UnknownKeyError, operator.lease(held, 60, key=Ed25519PrivateKey.generate())),
        (errors.ExpiredError, operator.lease(held, -1)),
    ):
        with pytest.raises(kind):
            operator.grant(held, lease)


class ByRequest(Operator):
    """An operator whose answers are by method and path: a digest is of every header."""

    def answers_to(self, held: Any) -> list[Answer]:
        return super().answers_to({**held, "target": targets.tool(held["target"])})


def test_operator_answers_requests_with_a_secret(
    world: InjectWorld, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the entry and the commands of docs/approvals.md."""
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    (world.home / "keys").mkdir(mode=0o700, exist_ok=True)
    key = world.home / "keys" / "ann.key"
    key.write_bytes(keyfile.plain(world.key))
    key.chmod(0o600)
    listed: list[str] = []

    def typed(words: Sequence[str]) -> Answer:
        def act(operator: Operator, held: Any) -> None:
            assert not [one for one in host.seen if one["path"] == "/hook/any"]
            attacked(operator, held)
            listed.append(covenant("approvals", "list"))
            covenant(*(held["id"] if word == "5d20" else word for word in words))

        return act

    answers = {
        f"GET {URL}/drip": [typed(UNTIL)],
        f"POST {URL}/taken": [typed(ONCE), typed(DENY), typed(SAME)],
        f"POST {URL}/hook/any": [typed(ANY)],
    }
    with ByRequest(world, answers) as operator:
        said, rows = run(world, CODE, GRANTS + internet.entries(("other.example.com", "[443]", "tls")))
    assert not operator.failed, operator.failed
    lines, *found = said
    assert lines < 500, "what still comes at the end of a lease is cut"
    assert [status for status, _ in found] == [200, 403, 200, 200, 200, 200, 200, 413, 403, 413], found
    assert "not_approved" in found[1][1]
    assert set(carried(host)) == {f"Bearer {SECRET}"}
    assert [one["body"] for one in host.seen if one["method"] == "POST"] == [b"first", b"same", b"same", b"a", b"b"]
    # The operator sees query, body and headers; the log has their digest.
    assert "first" in listed[1], listed
    assert '"query": "q=1"' in listed[3], listed
    told = [
        (row["type"], row["asks"], targets.tool(row["target"]), row.get("code"))
        for row in rows
        if row["type"].startswith("approval_")
    ]
    taken = f"POST {URL}/taken"
    given = ["approval_asked", "approval_granted"]
    assert [row[0] for row in told] == [*given, *given, "approval_asked", "approval_denied", *given, *given]
    assert told[5] == ("approval_denied", "inject", taken, "denied")
    assert "first" not in json.dumps([row for row in rows if "appr" in row["type"] or row["type"] == "denied"])
    ended = [(row["code"], targets.tool(row["target"])) for row in rows if row["type"] == "lease_ended"]
    assert ended == [("expired", f"GET {URL}/drip"), ("used", taken)]
    denied = {row["code"] for row in rows if row["type"] == "denied" and row["layer"] == "inject"}
    assert denied >= {"not_approved", "not_held", "path_refused"}
    assert not [row for row in rows if row["type"] == "drift"]
    run_id = next(row["run_id"] for row in rows if row["type"] == "approval_asked")
    exported = covenant("approvals", "export", run_id)
    assert 'methods = ["POST"]\npaths = ["/hook/any"]' in exported

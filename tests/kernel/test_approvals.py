"""A request of an agent for `on_deny = "ask"` is held at its gates until an operator grants or denies it."""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli import main
from covenant.keys import leasing
from covenant.keys.signers import Signer
from policy import errors
from policy.manifest import parse
from policy.signing import change, envelope, keyfile
from sandbox.control import approvals
from sandbox.control.manager import Requester
from tests.kernel import internet, revoking
from tests.kernel.conftest import leftovers
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL, World
from tests.kernel.world import ROOT as REPOSITORY

ROOT = Requester("operator@local", root=True)
GRANTS = (
    internet.entries(("other.example.com", "[443]", "tls"))
    + internet.entries(("*.example.com", "[443]", "tls")).rstrip()
    + '\non_deny = "ask"\nask_seconds = 7\n'
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    """A world whose operator is there to be asked."""
    made = NetworkedWorld(tmp_path_factory.mktemp("approvals"), warm=warm)
    internet.configured(made, net, ask_operators=True, attest_seconds=1)
    yield made
    assert leftovers(made) == []
    assert net.leftovers() == []


def signer(key: Ed25519PrivateKey) -> Signer:
    return Signer("tester", envelope.PublicKey(key.public_key().public_bytes_raw()), key.sign)


Answer = Callable[["Operator", Any], object]


class Operator:
    """An operator in a thread beside a run: looks for requests, and answers them by ``answers``, each by its target."""

    def __init__(self, world: World, answers: Mapping[str, Sequence[Answer]]) -> None:
        self.world, self._answers = world, {target: list(calls) for target, calls in answers.items()}
        self.failed: list[BaseException] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _loop(self) -> None:
        done: set[str] = set()
        while not self._over.wait(0.02):
            try:
                for one in approvals.listed(self.world.state, ROOT)["requests"]:
                    if one["id"] not in done:
                        done.add(one["id"])
                        self.answers_to(one).pop(0)(self, one)
            except BaseException as e:
                self.failed.append(e)

    def answers_to(self, held: Any) -> list[Answer]:
        """The answers to requests like this one that are left."""
        return self._answers[held["target"]]

    def lease(self, held: Any, seconds: float, duration: str = "until", key: Any = None, **other: Any) -> str:
        now_ms = int(time.time() * 1000)
        door, ends = signer(key or self.world.key), now_ms + int(seconds * 1000)
        raw, _ = leasing.lease_of({**held, **other}, door, duration=duration, expires_ms=ends, now_ms=now_ms)
        return raw.decode()

    def grant(self, held: Any, lease: str) -> Any:
        return approvals.grant(self.world.state, ROOT, held["id"], lease)


def granted(seconds: float, duration: str = "until") -> Answer:
    return lambda operator, held: operator.grant(held, operator.lease(held, seconds, duration))


def attacked(operator: Operator, held: Any) -> None:
    """Every lease that is not for this request is refused; then the request is granted, and the lease is used up."""
    for kind, lease in (
        (errors.LeaseError, operator.lease(held, 9, run_id="0" * 32)),
        (errors.LeaseError, operator.lease(held, 9, target="evil.example.com")),
        (errors.LeaseError, operator.lease(held, 9, policy_digest="0" * 64)),
        (errors.NoApprovalError, operator.lease({**held, "id": "0" * 16}, 9)),
        (errors.UnknownKeyError, operator.lease(held, 9, key=Ed25519PrivateKey.generate())),
        (errors.ExpiredError, operator.lease(held, -1)),
    ):
        with pytest.raises(kind):
            operator.grant(held, lease)
    good = operator.lease(held, 8)
    operator.grant(held, good)
    with pytest.raises(errors.NoApprovalError):
        operator.grant(held, good)


def denied(operator: Operator, held: Any) -> None:
    approvals.deny(operator.world.state, ROOT, held["id"])


CODE = """
import time
def timed(call):
    began = time.monotonic()
    return [call(), time.monotonic() - began]
def kept(name):
    context = ssl.create_default_context(cafile="/workspace/ca.pem")
    plain = socket.create_connection((name, 443), timeout=30)
    with context.wrap_socket(plain, server_hostname=name) as secure:
        try:
            return secure.recv(200).decode() or "closed"
        except OSError as e:
            return type(e).__name__
answer = {
    "plain": tls("other.example.com"),
    "unasked": tls("api.example.com", host="9.9.9.9"),
    "granted": tls("api.example.com"),
    "again": tls("api.example.com"),
    "kept": timed(lambda: kept("api.example.com")),
    "stale": tls("api.example.com", host="93.184.216.34"),
    "denied": tls("api.example.com"),
    "quiet": tls("api.example.com"),
    "once": tls("www.example.com"),
    "twice": tls("www.example.com", host="93.184.216.35"),
    "outside": tls("edge.example.net"),
    "unanswered": tls("rebind.example.com"),
}
"""


def said_by(world: NetworkedWorld, net: Internet, code: str) -> dict[str, Any]:
    """Run this code beside an operator, and return its answer."""
    answer = world.run_code(
        HEAD + internet.PROBES + internet.TLS_PROBE + code + TAIL,
        files={"ca.pem": net.certificate},
        more=GRANTS,
        network="outbound-https-only",
        cpu_ms=90000,
    )
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    found: dict[str, Any] = json.loads(answer.result.text)
    return found


def test_operator_answers_what_agent_asks(world: NetworkedWorld, net: Internet) -> None:
    answers: dict[str, list[Answer]] = {
        "api.example.com": [attacked, denied],
        "www.example.com": [granted(60, "once")],
        "rebind.example.com": [lambda operator, held: None],
    }
    before = len(world.rows())
    with Operator(world, answers) as operator:
        said = said_by(world, net, CODE)
    assert not operator.failed, operator.failed
    rows = [row["kind"] for row in world.rows()[before:]]
    kept, seconds = said.pop("kept")
    # The lease of 8 s ended the open connection.
    assert kept in ("closed", "ConnectionResetError", "SSLEOFError")
    assert seconds > 1
    assert said == {
        "plain": "other.example.com", "unasked": "ECONNRESET", "granted": "api.example.com",
        "again": "api.example.com", "stale": "ECONNREFUSED", "denied": "gaierror", "quiet": "gaierror",
        "once": "www.example.com", "twice": "ECONNREFUSED", "outside": "gaierror",
        "unanswered": "gaierror",
    }  # fmt: skip
    # By the name of the lease, also once the lease is over.
    assert {row["target"] for row in rows if row["type"] == "reached"} == {
        f"{name}.example.com:443/tls" for name in ("other", "api", "www")
    }
    of = [row for row in rows if row["type"].startswith(("approval", "lease"))]
    assert [(row["type"], row["target"], row.get("code")) for row in of] == [
        ("approval_asked", "api.example.com", None),
        ("approval_granted", "api.example.com", None),
        ("lease_ended", "api.example.com", "expired"),
        ("approval_asked", "api.example.com", None),
        ("approval_denied", "api.example.com", "denied"),
        ("approval_asked", "www.example.com", None),
        ("approval_granted", "www.example.com", None),
        ("lease_ended", "www.example.com", "used"),
        ("approval_asked", "rebind.example.com", None),
        ("approval_denied", "rebind.example.com", "expired"),
    ]
    assert (of[1]["signers"], of[1]["duration"], of[4]["by"]) == (["tester"], "until", "operator@local")
    assert not [row for row in rows if row["type"] == "drift"]
    # No resolver hears of a name that no operator granted.
    assert "rebind.example.com" not in net.resolver.names()


def test_lease_ends_with_the_key_that_gave_it(world: NetworkedWorld, net: Internet) -> None:
    """And with it the open connection. The run goes on: its package was signed by another."""
    second = revoking.second_operator(world)
    until_gone = {"began": 0.0}

    def given(operator: Operator, held: Any) -> None:
        operator.grant(held, operator.lease(held, 60, key=second))
        time.sleep(5)  # it connects
        revoked = revoking.next_root(
            world, lambda root: change.revoke_key(root, "second", now_ms=world.now_ms, reason="it was lost")
        )
        until_gone["began"] = time.time()
        revoking.revoke(world, revoked)

    before = len(world.rows())
    code = CODE[: CODE.index("answer =")]
    code += 'answer = {"kept": kept("api.example.com"), "at": time.time(), "after": tls("api.example.com")}\n'
    with Operator(world, {"api.example.com": [given, denied]}) as operator:
        said = said_by(world, net, code)
    assert not operator.failed, operator.failed
    assert said["kept"] in ("closed", "ConnectionResetError", "SSLEOFError")
    assert said["after"] == "gaierror"
    rows = [row["kind"] for row in world.rows()[before:] if row["kind"]["type"] == "lease_ended"]
    assert [(row["target"], row["code"]) for row in rows] == [("api.example.com", "revoked")]
    assert -1 < said["at"] - until_gone["began"] < 15


def test_unattended_run_denies_at_once(world: NetworkedWorld, net: Internet) -> None:
    internet.configured(world, net)
    before = len(world.rows())
    code = CODE[: CODE.index("answer =")] + 'answer = timed(lambda: tls("api.example.com"))\n'
    said, seconds = world.ask(
        internet.PROBES + internet.TLS_PROBE + code,
        files={"ca.pem": net.certificate},
        more=GRANTS,
        network="outbound-https-only",
    )
    assert said == "gaierror"
    assert seconds < 10
    assert not [row for row in world.rows()[before:] if row["kind"]["type"] == "approval_asked"]


def test_page_can_be_followed(world: NetworkedWorld, net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of docs/approvals.md answers a request of an agent with the entry of the page."""
    page = (REPOSITORY / "docs" / "approvals.md").read_text()
    page = page[: page.index("## Calls of tools")]
    entry, setting = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (shell,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for line in shell.splitlines()]
    name, _, value = setting.partition("#")[0].partition("=")
    internet.configured(world, net, **{name.strip(): json.loads(value)})
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    (world.home / "keys").mkdir(mode=0o700, exist_ok=True)
    key = world.home / "keys" / "ann.key"
    key.write_bytes(keyfile.plain(world.key))
    key.chmod(0o600)
    said: list[str] = []

    def typed(words: list[str], held: Any) -> None:
        done = CliRunner().invoke(main.cli, [held["id"][:4] if word == "3f9c" else word for word in words])
        assert done.exit_code == 0, (words, done.output, done.exception)
        said.append(done.output)

    def answer(words: list[str]) -> Answer:
        def act(operator: Operator, held: Any) -> None:
            typed(lines[0], held)
            typed(words, held)

        return act

    hosts = ("api.example.com", "other.example.com", "www.example.com", "rebind.example.com")
    answers = {host: [answer(words)] for host, words in zip(hosts, lines[1:], strict=True)}
    calls = ", ".join(f"tls({host!r})" for host in hosts)
    with Operator(world, answers) as operator:
        result = world.run_code(
            HEAD + internet.PROBES + internet.TLS_PROBE + f"answer = [{calls}]\n" + TAIL,
            files={"ca.pem": net.certificate},
            more=entry,
            network="outbound-https-only",
            cpu_ms=90000,
        )
    assert not operator.failed, operator.failed
    assert result.result is not None, result.error
    assert json.loads(result.result.text) == [*hosts[:3], "gaierror"]
    assert "granted api.example.com" in said[1]
    assert "LEASED" in said[2]
    assert "denied rebind.example.com" in said[-1]
    exported = CliRunner().invoke(main.cli, ["approvals", "export", result.run_id[:8]]).output
    head = (world.base / "packages" / "probe" / "agent.toml").read_bytes().partition(b"[[")[0]
    found = parse.parse(head + exported.encode()).permissions.network
    assert [(one.host, one.ports, one.asked) for one in found] == [(host, ((443, 443),), False) for host in hosts[:3]]

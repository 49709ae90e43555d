"""The answers of a warm sandbox to an intent before it begins. No sandbox runs here.

State, log and run directory are real. ``Leaf`` stands in for the cgroup.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from policy import decide, errors
from policy.lifecycle import State as RunState
from policy.signing import trust
from sandbox.audit.log import Ledger
from sandbox.config import Config, TlsSettings
from sandbox.kernel.net import unix_address
from sandbox.lifecycle.context import RunContext
from sandbox.lifecycle.run import Run
from sandbox.lifecycle.start_mode import StartRecord
from sandbox.lifecycle.types import DaemonTools, Request, RunDependencies
from sandbox.proxy_settings import ProxySettings
from sandbox.run_io import IntentDelivery, Limits
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import label
from sandbox.runner.spec import SandboxFiles, SandboxSpec, StartedSandbox
from sandbox.standby import dispatch, fingerprints, instance
from sandbox.storage.trust_state import State
from tests import rules_kit
from tests import signing_kit as kit
from tests.doubles.run_parts import Observer
from tests.unit.policy.compile import sample

HOST = structs.replace(rules_kit.HOST, runtimes={"python3": sample.closure("python3", "/usr/bin/python3")})
MANIFEST = kit.MANIFEST.decode() + "standby = 1\n"
MAKER = {"display": "standby@local", "pubkey": "1" * 44}
CALLER = {"display": "caller@local", "pubkey": "1" * 44}


class Leaf:
    """A cgroup without limits, frozen once it was told to."""

    paths: Mapping[str, Path] = {}
    is_frozen = False

    def freeze(self) -> None:
        self.is_frozen = True

    def keep_frozen(self) -> None:
        """No other cgroup is thawed here."""

    def frozen(self) -> bool:
        return self.is_frozen


class Client:
    """A client of the warm sandbox: everything that it says lies in the socket before it is accepted."""

    def __init__(self, directory: Path, *messages: Mapping[str, Any]) -> None:
        (name,) = [one.name for one in directory.iterdir() if one.name.startswith("standby-")]
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(60)
        with unix_address.within(directory, name) as place:
            self.connection.connect(place)
        for message in messages:
            dispatch.send(self.connection, message)

    def told(self) -> dict[str, Any]:
        return dispatch.receive(self.connection)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()


class Warm:
    """A warm sandbox that waits for its intent. ``records`` are the starts that it had written."""

    def __init__(self, context: RunContext, stack: contextlib.ExitStack) -> None:
        self.context, self.leaf = context, Leaf()
        self.records: list[StartRecord] = []
        self.one = instance.WarmSandbox(context, alive=-1, tell=lambda byte: None)
        stack.callback(self.one.close)
        Run(context, self.one)
        spec = self._prepared()
        self.directory = stack.enter_context(
            rundir_directory.RunDirectory(context.dependencies.path / "runs" / context.run_id, spec.label)
        ).path
        meter = SimpleNamespace(begin=lambda: None)
        self.started = StartedSandbox(self.directory, cast("Any", self.leaf), (), -1, None, cast("Any", meter))
        self.listener = self.one.on_frozen(self.started)

    def _prepared(self) -> SandboxSpec:
        context = self.context
        context.root = context.dependencies.state.trust_root(kit.NOW)
        trusted = kit.verify(context.request.package, context.root)
        decision = decide.authorise(trusted, decide.manifest_of(trusted.package), host=HOST, now_ms=kit.NOW)
        agent = decision.manifest.agent
        signers = trust.authorise(trusted, agent_id=agent.id, role=agent.role, operator=agent.operator)
        context.rows.attribute(signers, agent.operator)
        context.rows.transition(RunState.VALIDATED, "for a test")
        context.settle_standby(decision)
        self.one.decided(trusted, decision, HOST)
        place = context.place_for(trusted, decision.manifest, decision.effective, HOST)
        written, claim = context.label_for(place, self.one.check_serial)
        spec = SandboxSpec(
            run_id=context.run_id,
            artefacts=decision.artefacts,
            runsc_path="/nowhere",
            files=SandboxFiles(Path("/nowhere"), (), {}),
            intent=context.line,
            limits=Limits(1, 1, "cpu"),
            label=written,
            claim=claim,
            config=context.dependencies.config,
            observer=Observer(),
        )
        deadline = context.deadline(trusted, decision.manifest)
        self.one.begin(StartRecord(trusted, decision.manifest, deadline), self.records.append)
        return self.one.adapt(spec)

    def order(self, *, settings: str | None = None, issuer: Mapping[str, str] = CALLER) -> dict[str, Any]:
        request = Request(self.context.request.package, "an intent", issuer, intent_id="i")
        return dispatch.order(request, self.context.dependencies.config.digest if settings is None else settings)

    def asked(self, *messages: Mapping[str, Any]) -> tuple[Client, IntentDelivery | errors.RunError | None]:
        """A client that says ``messages``, and what the exchange is given."""
        client = Client(self.directory, *messages)
        return client, self.one.accept(self.started, self.listener)

    @property
    def go(self) -> dict[str, Any]:
        return {"go": self.context.run_id}


@pytest.fixture
def dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDependencies]:
    monkeypatch.setattr(time, "time", lambda: kit.NOW / 1000)
    tmp_path.chmod(0o700)
    (tmp_path / "runs").mkdir(mode=0o700)
    config = Config(state=tmp_path, host=kit.HOST)
    with (
        State(tmp_path) as state,
        Ledger.open(tmp_path / "audit", head=tmp_path / "audit-head" / "head.json") as ledger,
    ):
        state.init_root(kit.root_bytes(kit.root_document()), kit.NOW)
        yield RunDependencies(tmp_path, config, ledger, state, (), decide.Policies(), keeps_standby=True)


def waiting(dependencies: RunDependencies, stack: contextlib.ExitStack) -> Warm:
    package = rules_kit.signed(MANIFEST)
    return Warm(RunContext(dependencies, Request(package, "-", MAKER), now_ms=kit.NOW), stack)


@pytest.fixture
def warm(dependencies: RunDependencies) -> Iterator[Warm]:
    with contextlib.ExitStack() as stack:
        yield waiting(dependencies, stack)


def test_intent_is_delivered_to_warm_sandbox(warm: Warm) -> None:
    client, given = warm.asked(warm.order(), warm.go)
    with client:
        assert client.told()["offer"] == warm.context.run_id
        assert isinstance(given, IntentDelivery)
        line = json.loads(given.intent)
        assert (line["id"], line["text"]) == ("i", "an intent")
        assert [record.manifest.agent.id for record in warm.records] == ["hello"]
        assert (label.label_of(warm.directory) or {})["display"] == CALLER["display"]


@pytest.mark.parametrize("taken_away", [False, True])
def test_newer_root_sends_intent_elsewhere(warm: Warm, taken_away: bool) -> None:
    """The signature would hold under both roots. Who may sign for the role was decided under the first alone."""
    state = warm.context.dependencies.state
    state.replace_root(kit.root_bytes(kit.root_document(version=2)), kit.NOW)
    if taken_away:
        state.root_place(2).unlink()
    client, given = warm.asked(warm.order(), warm.go)
    with client:
        assert client.told()["offer"] == warm.context.run_id
        assert "trust root version 2 was installed after 1" in client.told()["cold"]
    assert isinstance(given, errors.KilledError)
    assert warm.records == []


@pytest.mark.parametrize("when", ["before the offer", "behind the gate"])
def test_useless_instance_ends_without_its_client(warm: Warm, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its label is gone behind the gate, so that no process would see it or the place that it holds."""
    client = Client(warm.directory, warm.order(), warm.go)

    def refused(*args: object, **kwargs: object) -> trust.TrustedPackage:
        client.connection.close()
        raise errors.TrustError("another root holds now")

    if when == "before the offer":
        warm.leaf.is_frozen = False
        client.connection.close()
    else:
        monkeypatch.setattr(trust, "again", refused)
    given = warm.one.accept(warm.started, warm.listener)
    assert isinstance(given, errors.KilledError)
    assert given.message.startswith("standby: ")


def test_caller_without_place_leaves_instance(dependencies: RunDependencies) -> None:
    """A caller with as many runs as it may have asks again and again: what is kept ready for others stays."""
    config = dependencies.config.model_copy(update={"caller_requests": 0})
    dependencies = structs.replace(dependencies, config=config)
    with contextlib.ExitStack() as stack:
        warm = waiting(dependencies, stack)
        before = warm.context.assignment, label.label_of(warm.directory)
        client, given = warm.asked(warm.order(issuer={"display": "uid:7@local", "pubkey": "1" * 44}), warm.go)
        with client:
            assert client.told()["offer"] == warm.context.run_id
            assert "no more may" in client.told()["cold"]
        assert given is None
        assert (warm.context.assignment, label.label_of(warm.directory)) == before
        # Control: a caller that is not bounded has the instance.
        client, given = warm.asked(warm.order(), warm.go)
        client.connection.close()
        assert isinstance(given, IntentDelivery)


def test_other_configuration_is_given_no_intent(warm: Warm) -> None:
    """A file that was written before it was made, and read by the supervisor after, is no change that it could see."""
    client, given = warm.asked(warm.order(settings="another"))
    with client:
        assert client.told() == {"cold": "another configuration"}
    # It is not known here which of the two is old, so that it goes on waiting; the control is one that fits.
    assert given is None
    client, given = warm.asked(warm.order(), warm.go)
    client.connection.close()
    assert isinstance(given, IntentDelivery)


def test_client_sent_elsewhere_leaves_nothing(warm: Warm) -> None:
    """An instance may wait for a day, and many clients may come in it."""

    def held() -> int:
        gc.collect()
        return sum(isinstance(each, socket.socket) for each in gc.get_objects())

    before = held()
    for _ in range(8):
        client, given = warm.asked(warm.order(settings="another"))
        with client:
            assert given is None
            assert client.told() == {"cold": "another configuration"}
        del client
    assert held() == before
    # Control: the connection of its present client stays until it is closed with the warm sandbox.
    client, given = warm.asked(warm.order(), warm.go)
    with client:
        assert isinstance(given, IntentDelivery)
        assert client.told()["offer"] == warm.context.run_id
        client.connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.connection.recv(1)
        warm.one.close()
        client.connection.settimeout(60)
        assert client.connection.recv(1) == b""


def test_package_without_sandbox_is_not_kept_ready(warm: Warm) -> None:
    trusted = kit.verify(warm.context.request.package, warm.context.root)
    with pytest.raises(errors.NotEnforceableError):
        warm.one.decided(trusted, None, HOST)


@pytest.mark.parametrize(
    ("manifest", "keeps", "more", "why"),
    [
        (MANIFEST, False, {}, "each run starts cold"),
        (MANIFEST, True, {"daemon": DaemonTools(-1, frozenset())}, "tools of the daemon starts cold"),
        (kit.MANIFEST.decode(), True, {}, "asks for no instance"),
    ],
)
def test_agent_without_instance_is_not_kept(
    dependencies: RunDependencies, manifest: str, keeps: bool, more: dict[str, Any], why: str
) -> None:
    dependencies = structs.replace(dependencies, keeps_standby=keeps)
    context = RunContext(dependencies, Request(rules_kit.signed(manifest), "-", MAKER, **more), now_ms=kit.NOW)
    trusted = kit.verify(context.request.package, dependencies.state.trust_root(kit.NOW))
    decision = decide.authorise(trusted, decide.manifest_of(trusted.package), host=HOST, now_ms=kit.NOW)
    context.settle_standby(decision)
    one = instance.WarmSandbox(context, alive=-1, tell=lambda byte: None)
    with contextlib.closing(one), pytest.raises(errors.NotEnforceableError, match=why):
        one.decided(trusted, decision, HOST)


def test_serial_that_was_not_accepted_is_refused(warm: Warm) -> None:
    """A cold run has a new highest serial accepted."""
    trusted = kit.verify(warm.context.request.package, warm.context.root)
    same = trust.Accepted(trusted.statement.serial, trusted.payload_digest)
    warm.one.check_serial(trusted, same)
    warm.one.check_serial(trusted, None)
    with pytest.raises(errors.BusyError):
        warm.one.check_serial(trusted, structs.replace(same, serial=same.serial - 1))


def test_new_authority_of_proxy_is_change(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("one")
    trusts = TlsSettings(ca=(ca,))

    def recorded(proxy: str) -> fingerprints.Files:
        return fingerprints.Files.of_config(Config(state=tmp_path, tls=trusts, proxy=ProxySettings(url=proxy)))

    made, unused = recorded("https://proxy.example:3128"), recorded("http://proxy.example:3128")
    assert made.changed(every_file=False) is None
    ca.write_text("another")
    assert made.changed(every_file=False) == str(ca)
    assert unused.changed(every_file=False) is None

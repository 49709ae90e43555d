"""Check a run's broker on secrets, with the real broker, a real socket and a real vault."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import denials, errors
from sandbox.broker import credentials
from sandbox.broker.credentials import Credentials, Scope, Tellers, json_text
from sandbox.broker.server import Broker
from sandbox.run_io import Outcome, Watches
from sandbox.vault import keys
from sandbox.vault.backend import OpenedSecret
from sandbox.vault.embedded import FileVault

REFUSED = {"error": {"code": "credential_refused", "message": "this credential is not available"}}
TOO_MANY = "too_many_requests"
SECRET = "s3cr3t-planted"


class Clock:
    """A clock in seconds that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """One agent's side of its broker, and the reports to its shim."""

    def __init__(
        self,
        vault: FileVault,
        agent_id: str = "probe",
        names: tuple[str, ...] = ("db", "missing"),
        *,
        begun: bool = True,
    ) -> None:
        self.clock, self.is_revoked = Clock(), False
        self.granted: list[tuple[str, int, str]] = []
        self.denied: list[tuple[str, str]] = []
        self.failing: errors.LedgerError | None = None
        tell = Tellers(self._granted, self._denied, lambda: self.is_revoked)
        source = credentials.Near(vault)
        self.served = Credentials(Scope(agent_id, frozenset(names), 60), source, tell, clock=self.clock)
        self.broker = Broker(clock=self.clock)
        self.broker.add(self.served.table, begin=self.served.begin)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.broker)
        self.agent = socket.socket(fileno=socket.dup(self.broker.guest))
        self.agent.setblocking(False)
        self._stack.callback(self.agent.close)
        if begun:
            self.broker.begin()

    def close(self) -> None:
        self._stack.close()

    def ask(self, **fields: Any) -> dict[str, Any]:
        return self.asked([fields])[0]

    def asked(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send these requests together and return their answers."""
        lines = [json.dumps({"id": n, **fields}) + "\n" for n, fields in enumerate(requests)]
        self.agent.sendall("".join(lines).encode())
        data = b""
        while data.count(b"\n") < len(requests):
            self.broker.serve()
            with contextlib.suppress(BlockingIOError):
                data += self.agent.recv(1 << 20)
        answers = [json.loads(line) for line in data.splitlines()]
        assert [answer.pop("id") for answer in answers] == list(range(len(requests)))
        return answers

    def token(self) -> str:
        token = self.ask(kind="token")["ok"]["token"]
        assert isinstance(token, str)
        return token

    def _granted(self, name: str, version: int, backend: str) -> None:
        if self.failing is not None:
            raise self.failing
        self.granted.append((name, version, backend))

    def _denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        if self.failing is not None:
            raise self.failing
        assert denial.layer == "credential"
        self.denied.append((denial.target, denial.code))


def nothing(change: object) -> None:
    """Do nothing: these tests have no log."""


def value(text: str) -> memoryview:
    return memoryview(text.encode())


@pytest.fixture
def vault(tmp_path: pathlib.Path) -> FileVault:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    keys.make_file(tmp_path / "key")
    made = FileVault(state, lambda: keys.configured(str(tmp_path / "key")))
    with keys.configured(str(tmp_path / "key")) as key:
        made.create([key], before=nothing)
    made.put("probe", "db", value(SECRET), before=nothing)
    made.put("probe", "other", value("not granted"), before=nothing)
    made.put("another", "db", value("another's"), before=nothing)
    return made


@pytest.fixture
def run(vault: FileVault) -> Iterator[Run]:
    with contextlib.closing(Run(vault)) as made:
        yield made


def test_granted_secret_is_answered_and_written_down(run: Run) -> None:
    assert run.ask(kind="credential", name="db", token=run.token()) == {"ok": {"version": 1, "value": SECRET}}
    assert (run.granted, run.denied) == ([("db", 1, "file")], [])


def test_child_of_another_id_has_its_own_secrets_and_only_names_of_both(vault: FileVault) -> None:
    with contextlib.closing(Run(vault, "another", ("db",))) as child:
        assert child.ask(kind="credential", name="db", token=child.token())["ok"]["value"] == "another's"
    with contextlib.closing(Run(vault, "third", ("db",))) as child:
        assert child.ask(kind="credential", name="db", token=child.token()) == REFUSED
        assert child.denied == [("db", "absent")]


def test_every_refusal_is_one_answer(run: Run, vault: FileVault) -> None:
    token = run.token()
    with contextlib.closing(Run(vault)) as neighbour:
        foreign = neighbour.token()
    asked: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({"name": "other", "token": token}, ("other", "not_granted")),
        ({"name": "missing", "token": token}, ("missing", "absent")),
        ({"name": "nothing-like-it", "token": token}, ("nothing-like-it", "not_granted")),
        ({"name": "db", "token": foreign}, ("db", "token")),
        ({"name": "db", "token": ""}, ("db", "token")),
        ({"name": "db", "token": None}, ("db", "token")),
        ({"name": "db", "token": "\ud800"}, ("db", "token")),
        ({"name": "db"}, ("db", "token")),
        ({"name": "db", "token": token, "agent_id": "another"}, ("db", "token")),
        ({"name": "db\0", "token": token}, ("", "malformed")),
        ({"name": "d\u0431", "token": token}, ("", "malformed")),
        ({"name": "DB", "token": token}, ("DB", "not_granted")),
        ({"name": "../another/db", "token": token}, ("", "malformed")),
        ({"name": "", "token": token}, ("", "malformed")),
        ({"name": {"db": 1}, "token": token}, ("", "malformed")),
        ({"token": token}, ("", "malformed")),
    ]
    for fields, told in asked:
        run.clock.now += 1
        assert run.ask(kind="credential", **fields) == REFUSED, fields
        assert run.denied[-1] == told
    assert run.granted == []


def test_token_is_given_once(run: Run) -> None:
    run.token()
    assert run.ask(kind="token") == REFUSED
    assert run.ask(kind="token", again=True) == REFUSED
    assert run.denied == [("", "token")] * 2


def test_token_ends_with_deadline(run: Run) -> None:
    first = run.ask(kind="token")["ok"]
    assert first["expires_ms"] == 60_000
    run.clock.now += 59.9
    assert "ok" in run.ask(kind="credential", name="db", token=first["token"])
    run.clock.now += 0.1
    assert run.ask(kind="credential", name="db", token=first["token"]) == REFUSED
    assert run.denied == [("db", "expired")]


def test_what_is_asked_before_intent_is_given_is_answered_then(vault: FileVault) -> None:
    """The vault at the time of the intent answers: a standby has no earlier secrets. At most twenty requests wait."""
    with contextlib.closing(Run(vault, begun=False)) as run:
        run.agent.sendall(b"".join(b'{"id": %d, "kind": "token"}\n' % n for n in range(25)))
        run.broker.serve()
        run.broker.round().look()
        early = [json.loads(line) for line in run.agent.recv(1 << 16).splitlines()]
        assert [one["error"]["code"] for one in early] == [TOO_MANY] * 5
        vault.rotate("probe", "db", value("of then"), before=nothing)
        run.clock.now += 1000
        run.broker.begin()
        first, *others = [json.loads(line) for line in run.agent.recv(1 << 16).splitlines()]
        assert first["ok"]["expires_ms"] == 60_000
        assert {one["error"]["code"] for one in others} == {"credential_refused"}
        run.clock.now += 1
        said = run.ask(kind="credential", name="db", token=first["ok"]["token"])
        assert said == {"ok": {"version": 2, "value": "of then"}}


def test_token_asked_for_after_deadline_is_refused(run: Run) -> None:
    run.clock.now += 60
    assert run.ask(kind="token") == REFUSED


def test_run_revoked_gets_no_more(run: Run) -> None:
    token = run.token()
    assert "ok" in run.ask(kind="credential", name="db", token=token)
    run.is_revoked = True
    assert run.ask(kind="credential", name="db", token=token) == REFUSED
    assert run.denied == [("db", "revoked")]


def test_vault_that_takes_its_time_for_each_secret_does_not_keep_start_for_all_of_them(run: Run) -> None:
    class Slow:
        name = "slow"
        asked = 0

        def ask(self, agent_id: str, name: str, then: Callable[[credentials.Found], None]) -> None:
            self.asked += 1
            run.clock.now += 5
            then(None)

        def settle(self, watches: Watches) -> Outcome:
            """Return at once: the vault has answered."""
            return None

    def given(names: int) -> Slow:
        source = Slow()
        tell = Tellers(lambda *_: None, lambda *_, **__: None, lambda: False)
        scope = Scope("probe", {f"n{number}" for number in range(names)}, 60)
        Credentials(scope, source, tell, clock=run.clock).put_all(lambda *_: None, {}, seconds=12)
        return source

    assert given(3).asked == 3  # the control: the broker waits for a request that began in time
    with pytest.raises(errors.VaultError, match="within 12 s"):
        given(4)


def test_rotation_and_removal_hold_at_next_request(run: Run, vault: FileVault) -> None:
    token = run.token()
    vault.rotate("probe", "db", value("newer"), before=nothing)
    assert run.ask(kind="credential", name="db", token=token)["ok"] == {"version": 2, "value": "newer"}
    vault.remove("probe", "db", before=nothing)
    assert run.ask(kind="credential", name="db", token=token) == REFUSED
    vault.put("probe", "db", value("again"), before=nothing)
    assert run.ask(kind="credential", name="db", token=token)["ok"]["value"] == "again"


def test_vault_that_cannot_be_opened_is_refusal_like_any_other(run: Run, tmp_path: pathlib.Path) -> None:
    token = run.token()
    (tmp_path / "key").chmod(0o644)
    assert run.ask(kind="credential", name="db", token=token) == REFUSED
    assert run.ask(kind="credential", name="other", token=token) == REFUSED
    assert run.denied == [("db", "unavailable"), ("other", "not_granted")]


def test_row_that_cannot_be_written_gives_nothing_and_ends_run(run: Run) -> None:
    token = run.token()
    run.failing = errors.LedgerError("the disk is full")
    run.agent.sendall(json.dumps({"id": 1, "kind": "credential", "name": "db", "token": token}).encode() + b"\n")
    with pytest.raises(errors.LedgerError):
        run.broker.serve()
    with pytest.raises(BlockingIOError):
        run.agent.recv(1)


def test_hundred_thousand_requests_get_bounded_number_of_answers(run: Run) -> None:
    """The test calls the handler directly, because the broker's own limit would slow an agent down."""
    token, said = run.token(), {"ok": 0, "error": 0}

    class Call:
        def __init__(self) -> None:
            self.fields = {"name": "db", "token": token}

        def answer(self, fields: object, *, secret: object = None) -> None:
            said["ok"] += 1

        def refuse(self, code: str, message: str) -> None:
            assert code == TOO_MANY
            said["error"] += 1

    call: Any = Call()
    for _ in range(100_000):
        run.clock.now += 0.0001  # ten seconds in all
        run.served.credential(call)
    assert said["ok"] == len(run.granted) <= credentials.BURST + 10 * credentials.PER_SECOND
    assert said["ok"] + said["error"] == 100_000
    # A long run has a bound as well.
    run.served.scope = Scope("probe", frozenset({"db"}), 1e9)
    run.served.begin()
    for _ in range(2 * credentials.MOST_GRANTS):
        run.clock.now += 1
        run.served.credential(call)
    assert len(run.granted) == credentials.MOST_GRANTS


def test_what_is_absent_takes_what_is_not_granted_takes(run: Run) -> None:
    """Measured by work and not by a clock: each refusal opens the vault once for an absent name."""
    token, asked = run.token(), []
    source = run.served.source

    class Counting:
        name = "file"

        def ask(self, agent_id: str, name: str, then: Callable[[credentials.Found], None]) -> None:
            asked.append((agent_id, name))
            source.ask(agent_id, name, then)

        def settle(self, watches: Watches) -> Outcome:
            return source.settle(watches)

    run.served.source = Counting()
    for name in ("missing", "other", "nothing-like-it", "db\0"):
        run.ask(kind="credential", name=name, token=token)
    assert asked == [("probe", "missing")] + [("probe", credentials.NO_NAME)] * 3


def test_reader_that_does_not_read_has_what_waits_overwritten(run: Run, vault: FileVault) -> None:
    """Also when the agent disconnects with unread answers."""
    long = "x" * 16_000
    vault.rotate("probe", "db", value(long), before=nothing)
    token = run.token()
    run.agent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    held = []
    for number in range(40):
        run.clock.now += 1
        line = {"id": number, "kind": "credential", "name": "db", "token": token}
        run.agent.sendall(json.dumps(line).encode() + b"\n")
        run.broker.serve()
        held += [one for one in run.broker._held if one is not None and one not in held]
    assert held, "everything was taken at once: nothing was tried"
    run.agent.shutdown(socket.SHUT_RDWR)
    run.agent.close()
    run.broker.serve()
    run.broker.serve()
    assert all(one._map.closed for one in held)


@given(st.text().filter(lambda text: len(text.encode("utf-8", "surrogatepass")) < 4000))
def test_text_survives_being_quoted(text: str) -> None:
    raw = text.encode("utf-8", "ignore")
    with json_text(memoryview(raw)) as quoted:
        line = b'"' + bytes(quoted.view) + b'"'
    assert json.loads(line) == raw.decode()
    assert b"\n" not in line


def test_no_secret_stands_in_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while the secret is in clear text must not print it in the command line's traceback."""
    token = run.token()

    def fails(*arguments: object, **more: object) -> None:
        raise RuntimeError("something broke")

    monkeypatch.setattr(credentials, "json_text", fails)
    run.agent.sendall(json.dumps({"id": 1, "kind": "credential", "name": "db", "token": token}).encode() + b"\n")
    with pytest.raises(RuntimeError) as caught:
        run.broker.serve()
    text = "".join(traceback.format_exception(caught.value))
    assert "something broke" in text
    assert SECRET not in text
    assert SECRET not in repr(run.served) + repr(OpenedSecret.__dict__)

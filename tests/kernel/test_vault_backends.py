"""Both vaults by one suite: the embedded file, and a real OpenBao server on loopback."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy import errors
from policy.manifest.services import PROVIDERS_ID
from sandbox.broker.vault_process import Fetcher
from sandbox.config import Config, VaultSettings
from sandbox.kernel.proc.secret_memory import Locked
from sandbox.lifecycle import model_terms
from sandbox.vault import keys
from sandbox.vault.backend import MAX_VALUE_BYTES, Backend, Change, OpenedSecret
from sandbox.vault.embedded import FileVault
from sandbox.vault.openbao import OpenBao
from tests.kernel import live_runs, openbao_raft
from tests.kernel.openbao_raft import RaftServer
from tests.kernel.openbao_server import READ_ONLY, Server, private


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaftServer]:
    with openbao_raft.running(tmp_path_factory.mktemp("openbao")) as made:
        yield made


_prefixes = iter(range(1000))


@pytest.fixture(params=["file", "openbao"])
def vault(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """An empty one."""
    if request.param == "file":
        (tmp_path / "state").mkdir(mode=0o700)
        keys.make_file(tmp_path / "key")
        made = FileVault(tmp_path / "state", lambda: keys.configured(str(tmp_path / "key")))
        with keys.configured(str(tmp_path / "key")) as key:
            made.create([key], before=lambda change: None)
        return made
    server: Server = request.getfixturevalue("server")
    return OpenBao(server.settings.model_copy(update={"prefix": f"covenant-{next(_prefixes)}"}))


class Log:
    """Keeps the changes that it is told of, or refuses them."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.changes: list[tuple[str, str, str, int]] = []
        self._refuses = refuses

    def __call__(self, change: Change) -> None:
        if self._refuses:
            raise errors.LedgerError("no room")
        self.changes.append((change.action, change.agent_id, change.name, change.version))


def value(text: str) -> memoryview:
    return memoryview(text.encode())


def read(vault: Backend, agent: str = "a", name: str = "n") -> tuple[int, str] | None:
    with vault.opened(agent, name) as found:
        return None if found is None else (found.version, bytes(found.value.view).decode())


# --- the contract -----------------------------------------------------------------------------------------------


def test_life_of_secret(vault: Backend) -> None:
    log, before_ms = Log(), int(time.time() * 1000) - 2000
    first = vault.put("a", "n", value("one"), before=log)
    assert (first.agent_id, first.name, first.version) == ("a", "n", 1)
    assert before_ms < first.created_ms <= first.changed_ms < before_ms + 600_000
    assert read(vault) == (1, "one")
    assert vault.rotate("a", "n", value("two"), before=log).version == 2
    assert read(vault) == (2, "two")
    assert vault.entries()[0].created_ms == first.created_ms
    assert vault.remove("a", "n", before=log).version == 2
    assert (read(vault), vault.entries()) == (None, [])
    assert vault.put("a", "n", value("three"), before=log).version == 1
    assert read(vault) == (1, "three")
    assert log.changes == [
        ("put", "a", "n", 1),
        ("rotated", "a", "n", 2),
        ("removed", "a", "n", 2),
        ("put", "a", "n", 1),
    ]


def test_secret_is_its_agents(vault: Backend) -> None:
    places = [("a", "n"), ("a.b", "n"), ("a", "N"), ("A", "n"), ("a", "n.m"), ("a-n", "n"), ("data", "metadata")]
    for number, place in enumerate(places):
        vault.put(*place, value(f"value {number}"), before=Log())
    for number, place in enumerate(places):
        assert read(vault, *place) == (1, f"value {number}")
    assert [(e.agent_id, e.name) for e in vault.entries()] == sorted(places)
    assert [e.name for e in vault.entries("a")] == ["N", "n", "n.m"]
    assert vault.entries("nobody") == []
    assert read(vault, "nobody", "n") is None


@pytest.mark.parametrize(
    "text", ["x", " \t", "ümlaut \U0001f511", '"quoted" \\ {}', "line\nand line\n", "y" * MAX_VALUE_BYTES]
)
def test_any_text_comes_back_as_it_was(vault: Backend, text: str) -> None:
    text = text if len(text.encode()) <= MAX_VALUE_BYTES else text[:MAX_VALUE_BYTES]
    vault.put("a", "n", value(text), before=Log())
    assert read(vault) == (1, text)


@pytest.mark.parametrize("bad", [b"", b"\0", b"a\0b", b"\xff", b"y" * (MAX_VALUE_BYTES + 1)])
def test_what_is_no_text_is_refused(vault: Backend, bad: bytes) -> None:
    log = Log()
    with pytest.raises(errors.SecretError) as caught:
        vault.put("a", "n", memoryview(bad), before=log)
    assert (caught.value.__cause__, log.changes, read(vault)) == (None, [], None)


NO_PLACES = [
    *(("", "n"), ("..", "n"), (".", "n"), ("a/b", "n"), ("a b", "n"), ("a\n", "n")),
    *(("a", ""), ("a", ".."), ("a", "../n"), ("a", "n/m"), ("a", "n\0"), ("a", "n\n"), ("a", "d\u0431")),
    *(("a", "%2e%2e"), ("a", "n?version=1"), ("a", "x" * 129)),
]


@pytest.mark.parametrize(("agent", "name"), NO_PLACES)
def test_what_is_no_name_is_refused_and_leads_nowhere(vault: Backend, agent: str, name: str) -> None:
    log = Log()
    acts: list[Callable[[], object]] = [
        lambda: vault.put(agent, name, value("x"), before=log),
        lambda: vault.rotate(agent, name, value("x"), before=log),
        lambda: vault.remove(agent, name, before=log),
    ]
    for act in acts:
        with pytest.raises(errors.SecretError):
            act()
    assert log.changes == []
    if agent == "a":
        vault.put("a", "n", value("there"), before=log)
        assert read(vault, agent, name) is None


def test_each_change_wants_what_it_changes(vault: Backend) -> None:
    log = Log()
    acts: list[Callable[[], object]] = [
        lambda: vault.rotate("a", "n", value("x"), before=log),
        lambda: vault.remove("a", "n", before=log),
    ]
    for act in acts:
        with pytest.raises(errors.SecretError, match="has no secret"):
            act()
    vault.put("a", "n", value("x"), before=log)
    with pytest.raises(errors.SecretError, match="already"):
        vault.put("a", "n", value("y"), before=log)
    assert (len(log.changes), read(vault)) == (1, (1, "x"))


def test_log_that_takes_no_row_changes_nothing(vault: Backend) -> None:
    vault.put("a", "n", value("one"), before=Log())
    mute = Log(refuses=True)
    acts: list[Callable[[], object]] = [
        lambda: vault.put("a", "m", value("two"), before=mute),
        lambda: vault.rotate("a", "n", value("two"), before=mute),
        lambda: vault.remove("a", "n", before=mute),
    ]
    for act in acts:
        with pytest.raises(errors.LedgerError):
            act()
    assert ([(e.name, e.version) for e in vault.entries()], read(vault)) == ([("n", 1)], (1, "one"))


def test_value_is_overwritten_when_context_ends(vault: Backend) -> None:
    vault.put("a", "n", value("one"), before=Log())
    with vault.opened("a", "n") as found:
        assert found is not None
        held = found.value
        inside = held.view[:]
    assert held._map.closed or bytes(inside) == b"\0\0\0"


# --- OpenBao alone -----------------------------------------------------------------------------------------------


def bao(server: Server, **changes: object) -> OpenBao:
    return OpenBao(server.settings.model_copy(update=changes))


def test_token_that_may_only_read_hands_out_and_changes_nothing(server: Server) -> None:
    bao(server).put("reader", "n", value("one"), before=Log())
    reader = bao(server, token=server.token("reads", READ_ONLY))
    assert read(reader, "reader") == (1, "one")
    assert read(reader, "reader", "absent") is None
    acts: list[Callable[[], object]] = [
        lambda: reader.rotate("reader", "n", value("two"), before=Log()),
        lambda: reader.remove("reader", "n", before=Log()),
        reader.entries,
    ]
    for act in acts:
        with pytest.raises(errors.VaultKeyError, match="does not take the token"):
            act()


def test_what_another_process_did_there(server: Server) -> None:
    """A version that was deleted, one of another form, and a write in between."""
    vault, kv = bao(server), server.client().secrets.kv.v2
    vault.put("theirs", "gone", value("one"), before=Log())
    kv.delete_latest_version_of_secret(path="covenant/theirs/gone", mount_point="secret")
    assert (read(vault, "theirs", "gone"), vault.entries("theirs")) == (None, [])
    for number, secret in enumerate([{"other": "x"}, {"value": ""}, {"value": "a\0b"}, {"value": "x" * 20_000}]):
        kv.create_or_update_secret(path=f"covenant/theirs/odd{number}", secret=secret, mount_point="secret")
        with pytest.raises(errors.VaultError, match="is no secret"):
            read(vault, "theirs", f"odd{number}")

    def meanwhile(change: Change) -> None:
        kv.create_or_update_secret(path="covenant/theirs/raced", secret={"value": "theirs"}, mount_point="secret")

    with pytest.raises(errors.SecretError, match="by somebody else"):
        vault.put("theirs", "raced", value("ours"), before=meanwhile)
    assert read(vault, "theirs", "raced") == (1, "theirs")


def test_server_not_one(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its authority it is not believed; the environment names neither server, token nor authority."""
    for name in ("VAULT_ADDR", "VAULT_TOKEN", "VAULT_CACERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY"):
        monkeypatch.setenv(name, str(server.settings.ca) if "CA" in name else "http://127.0.0.1:1")
    with pytest.raises(errors.VaultError, match="does not answer: SSLError"):
        read(bao(server, ca=None))
    assert read(bao(server), "nobody") is None
    with pytest.raises(errors.VaultKeyError, match="does not take the token"):
        read(bao(server, token=private(tmp_path / "wrong", "s.wrong")))
    loose = private(tmp_path / "loose", "x")
    loose.chmod(0o644)
    with pytest.raises(errors.VaultKeyError, match="is not private"):
        bao(server, token=loose)
    with pytest.raises(errors.VaultError, match="no such KV"):
        bao(server, mount="elsewhere").put("a", "n", value("x"), before=Log())


def test_server_that_hangs_ends_in_its_time(server: Server) -> None:
    vault = bao(server, timeout_seconds=1)
    server.stop()
    try:
        with pytest.raises(errors.VaultError, match=r"does not answer: (Read|Connect)Timeout"):
            read(vault)
    finally:
        server.go_on()
    assert read(bao(server)) is None


def test_what_was_acknowledged_is_there_after_server_was_killed(server: RaftServer) -> None:
    """And while it is sealed nothing is given, and nothing is taken for absent."""
    vault = bao(server)
    vault.put("kept", "n", value("one"), before=Log())
    assert vault.rotate("kept", "n", value("two"), before=Log()).version == 2
    server.restart()
    with pytest.raises(errors.VaultError, match="sealed"):
        read(vault, "kept")
    server.unseal()
    assert read(vault, "kept") == (2, "two")
    assert vault.remove("kept", "n", before=Log()).version == 2
    assert read(vault, "kept") is None


# --- a process that asks ------------------------------------------------------------------------------------------


class Answers:
    """The answers to a fetcher, in the order of its questions."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def __call__(self, found: OpenedSecret | errors.VaultError | None) -> None:
        if isinstance(found, OpenedSecret):
            assert isinstance(found.value, Locked)
            self.said.append((found.version, bytes(found.value.view).decode()))
        else:
            self.said.append(None if found is None else type(found))


def collect(fetcher: Fetcher, answers: Answers, count: int) -> list[object]:
    import select

    poll = select.poll()
    poll.register(fetcher.fileno(), select.POLLIN)
    while len(answers.said) < count:
        assert poll.poll(20_000), "no answer"
        fetcher.serve()
    return answers.said


def test_fetcher_asks_without_its_keeper_waiting(server: Server) -> None:
    settings: VaultSettings = server.settings
    OpenBao(settings).put("fetched", "n", value("one"), before=Log())
    answers = Answers()
    with Fetcher(lambda: OpenBao(settings), "fetched", seconds=20) as fetcher:
        for name in ("n", "absent", "", "n"):
            fetcher.ask("fetched", name, answers)
        assert answers.said == []  # nothing waits in `ask`
        assert collect(fetcher, answers, 4) == [(1, "one"), None, None, (1, "one")]
        server.stop()
        try:
            fetcher.ask("fetched", "n", answers)
            assert collect(fetcher, answers, 5)[4] is errors.VaultError
        finally:
            server.go_on()
        os.kill(fetcher._process.pid, 9)
        fetcher.ask("fetched", "n", answers)
        if len(answers.said) == 5:
            collect(fetcher, answers, 6)
        assert answers.said[5] is errors.VaultError
        fetcher.ask("fetched", "n", answers)
        assert answers.said[6] is errors.VaultError


def test_key_of_provider_that_goes_ends_the_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = OpenBao(server.settings)
    vault.put(PROVIDERS_ID, "watched", value("the key"), before=Log())
    (tmp_path / "providers.toml").write_text('[providers.p]\nkind = "openai"\nsecret = "watched"\n')
    config = Config(vault=server.settings, state=tmp_path)
    monkeypatch.setattr(model_terms, "FAR_SECONDS", 0.0)
    grants = SimpleNamespace(services=SimpleNamespace(models=(("p", "*"),)), web=SimpleNamespace(search=()))
    with contextlib.ExitStack() as stack:
        watch = model_terms.KeyWatch(cast("Any", SimpleNamespace(effective=grants)), config, stack)
        for _ in range(20):  # while it is there
            assert watch.look() is None
            time.sleep(0.02)
        server.stop()
        assert watch.look() is None  # nothing waits
        server.go_on()
        monkeypatch.setattr(model_terms, "FAR_SECONDS", 3600.0)
        live_runs.until(lambda: watch.look() is None and not watch.is_checking)
        vault.remove(PROVIDERS_ID, "watched", before=Log())
        watch.look(anew=True)  # the removal is announced, long before the next look by the clock
        assert watch.is_checking
        why = live_runs.until(watch.look)
    assert (type(why), "`p`" in why.message) == (errors.RunRevokedError, True)


def test_vault_that_cannot_be_used_is_said_before_anything_starts(server: Server, tmp_path: Path) -> None:
    wrong = server.settings.model_copy(update={"token": private(tmp_path / "wrong", "s.wrong")})
    with pytest.raises(errors.VaultError, match="does not take the token"):
        Fetcher(lambda: OpenBao(wrong), "a", seconds=20)

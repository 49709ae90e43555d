"""A local key signs for any agent id, so a run under it has no token by which the daemon knows that agent."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.grants.services import AgentSet, ServiceSet, TelemetrySet, WebSet
from sandbox import config
from sandbox.lifecycle import model_terms
from sandbox.lifecycle.types import Request
from sandbox.network.service import upstream
from tests.kernel.tls_servers import Certificates


def _terms(*, dev: str, typed: bool, agents: tuple[str, ...]) -> None:
    nothing: Any = None
    request = Request(nothing, "", {}, dev=dev, typed=typed)
    decision: Any = types.SimpleNamespace(effective=types.SimpleNamespace(agents=agents))
    model_terms.of(decision, nothing, nothing, request, None)


def test_dev_run_has_no_token_of_an_agent() -> None:
    with pytest.raises(errors.VaultError, match="no token of an agent") as refused:
        _terms(dev="asker", typed=False, agents=("other",))
    assert refused.value.details["grant"] == "services.agents"


@pytest.mark.parametrize(
    ("dev", "typed", "agents"), [("", False, ("a",)), ("asker", True, ("a",)), ("asker", False, ())]
)
def test_other_runs_go_on_to_the_providers(dev: str, *, typed: bool, agents: tuple[str, ...]) -> None:
    with pytest.raises(AttributeError, match="state"):  # of the configuration, which is none here
        _terms(dev=dev, typed=typed, agents=agents)


def _of(state: Path, *, models: ServiceSet, telemetry: TelemetrySet, web: WebSet | None = None) -> None:
    nothing: Any = None
    granted = {"services": models, "web": web or WebSet(), "agents": AgentSet(), "telemetry": telemetry}
    decision: Any = types.SimpleNamespace(
        effective=types.SimpleNamespace(**granted),
        manifest=types.SimpleNamespace(agent=types.SimpleNamespace(id="asker")),
    )
    package: Any = types.SimpleNamespace(digest="0" * 64)
    rows: Any = types.SimpleNamespace(run_id="run-1")
    model_terms.of(decision, config.load(state), rows, Request(package, "", {}), nothing)


def test_missing_authorities_are_not_the_systems(tmp_path: Path) -> None:
    pinned, models, signals = tmp_path / "pinned.pem", ServiceSet.of([("far", "m*")]), TelemetrySet.of(["logs"])
    (tmp_path / "providers.toml").write_text(
        f'[providers.far]\nkind = "openai-compatible"\nendpoint = "https://models.example/v1"\nca = "{pinned}"\n'
    )
    (tmp_path / "config.toml").write_text(f'[export]\nagents = "https://collector.example"\nagents_ca = "{pinned}"\n')
    for grants in ({"models": models, "telemetry": TelemetrySet()}, {"models": ServiceSet(), "telemetry": signals}):
        with pytest.raises(errors.ConfigError, match=r"pinned\.pem") as refused:
            _of(tmp_path, **grants)  # type: ignore[arg-type]
        assert refused.value.hint
    pinned.write_text("no certificate")
    with pytest.raises(errors.ConfigError, match=r"providers\.far\.ca: .* has no certificate in PEM"):
        _of(tmp_path, models=models, telemetry=signals)
    Certificates(tmp_path, "models.example").path.rename(pinned)
    _of(tmp_path, models=models, telemetry=signals)


def test_missing_authorities_of_a_page_are_named(tmp_path: Path) -> None:
    (tmp_path / "providers.toml").write_text(f'[fetch."wiki.example"]\nca = "{tmp_path}/internal.pem"\n')
    (tmp_path / "providers.toml").chmod(0o600)
    web = WebSet.of((), ["wiki.example"])
    with pytest.raises(errors.ConfigError, match=r"fetch\.wiki\.example\.ca: `.*`: No such file") as refused:
        _of(tmp_path, models=ServiceSet(), telemetry=TelemetrySet(), web=web)
    assert refused.value.hint == "name a file of certificates in PEM"
    # The fix. A page that is not granted needs no file.
    Certificates(tmp_path, "wiki.example").path.rename(tmp_path / "internal.pem")
    _of(tmp_path, models=ServiceSet(), telemetry=TelemetrySet(), web=web)
    (tmp_path / "internal.pem").unlink()
    _of(tmp_path, models=ServiceSet(), telemetry=TelemetrySet())


def test_gate_without_its_file_of_authorities_does_not_start(tmp_path: Path) -> None:
    nothing: Any = None
    peer = upstream.ProviderPeer(0, "far", "openai", "https://models.example", "", 1, str(tmp_path / "pinned.pem"))

    async def make() -> None:
        upstream.ProviderClient(nothing, peer)

    with pytest.raises(FileNotFoundError):
        asyncio.run(make())


class _Silent:
    """A vault that opens, and then answers no question about a secret. Each is a byte of ``asked``."""

    def __init__(self, asked: Path) -> None:
        self.asked = asked

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[None]:
        if name:
            with self.asked.open("a") as file:
                file.write("?")
            raise errors.VaultError("sealed")
        yield


def test_vault_that_cannot_be_asked_confirms_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "providers.toml").write_text('[providers.p]\nkind = "openai"\nsecret = "key"\n')
    vault = _Silent(tmp_path / "asked")
    vault.asked.touch()
    monkeypatch.setattr(model_terms, "configured", lambda settings: vault)
    effective = types.SimpleNamespace(services=ServiceSet.of([("p", "*")]), web=WebSet(), agents=AgentSet())
    decision: Any = types.SimpleNamespace(effective=effective)
    far = config.Config(state=tmp_path, vault=config.VaultSettings(backend="openbao"))
    with contextlib.ExitStack() as stack:
        watch, until = model_terms.KeyWatch(decision, far, stack), time.monotonic() + 30
        assert watch.look(anew=True) is None
        while vault.asked.stat().st_size < 3:  # asked again: the failure is no answer
            assert watch.is_checking
            assert time.monotonic() < until
            assert watch.look() is None
            time.sleep(0.01)

"""A stream of a live run that is cut: by its provider's death, by the end of the run, and by its key's removal.

In each the agent gets an error or no further byte, the provider sees the connection end, and nothing is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.rundir import registry
from sandbox.shim import control_socket
from tests.kernel import live_runs, revoking
from tests.kernel.conftest import leftovers
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.live_runs import Live, until
from tests.kernel.test_credentials import vault
from tests.kernel.world import HEAD, ROOT, TAIL, World

MORE = """[services.models]
allow = [{ provider = "fake", models = ["big-*"] }]
[services.fetch]
hosts = ["mock.example"]
"""
PROVIDERS = """
[providers.fake]
kind = "openai-compatible"
endpoint = "{url}"
secret = "fake"
[fetch."mock.example"]
mock = true
"""
STREAMS = (
    HEAD
    + """
import http.client
line = http.client.HTTPConnection("models.covenant", timeout=120)
body = {"model": "big-1", "stream": True, "messages": []}
line.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
found, count, fault = line.getresponse(), 0, ""
try:
    while found.read(64):  # readline() would take a stream that breaks off for one that ends
        count += 1
except (OSError, http.client.HTTPException) as e:
    fault = type(e).__name__
answer = {"status": found.status, "parts": count, "fault": fault}
"""
    + TAIL
)
# The provider as a process of its own, which says where it is and streams for ever.
ALONE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.kernel import fake_provider
with fake_provider.serving() as made:
    made.parts, made.gap_seconds = 1 << 30, 0.05
    print(made.url, flush=True)
    while not made.seen:
        time.sleep(0.05)
    time.sleep(1)
    print("it streams", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, warm: Path, provider: Provider) -> Iterator[World]:
    base = tmp_path_factory.mktemp("services")
    world = World(base, warm=warm)
    _with_vault(world)
    vault(world, "init")
    vault(world, "put", "covenant-providers", "fake", secret=KEY + "\n")
    (world.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
    yield world
    assert leftovers(world) == []


def _with_vault(world: World) -> None:
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{world.base}/vault.key"\n')


@pytest.fixture(autouse=True)
def _endless(provider: Provider) -> None:
    provider.seen.clear()
    provider.cut.clear()
    provider.parts, provider.gap_seconds = 1 << 30, 0.05


def _covenant(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def _asked(one: Live) -> dict[str, Any]:
    (row,) = one.rows("model_asked")
    return row


def test_run_with_services_is_attested_and_shown_and_its_end_cuts_the_stream(served: World, provider: Provider) -> None:
    with live_runs.live(served, STREAMS, more=MORE) as one:
        until(lambda: provider.seen)
        run_id = one.made.run_id
        shown = json.loads(_covenant(served, "ps", "--json").stdout)["runs"]
        assert shown[0]["services"] == ["models.covenant", "fetch.covenant"]
        assert "has a service gate for models.covenant, fetch.covenant" in _covenant(served, "ps").stdout
        attested = _covenant(served, "attest", run_id)
        assert attested.returncode == 0, attested.stdout + attested.stderr
        assert not provider.cut.is_set()
        killed = _covenant(served, "kill", run_id, "--reason", "enough")
        assert killed.returncode == 0, killed.stderr
        assert provider.cut.wait(30)
        assert one.wait().error is not None
        assert _asked(one)["whole"] is False
        assert one.drift() == []
    assert KEY not in json.dumps(served.rows())


def test_key_that_is_removed_cuts_the_stream(served: World, provider: Provider) -> None:
    with live_runs.live(served, STREAMS, more=MORE) as one:
        until(lambda: provider.seen)
        vault(served, "put", "covenant-providers", "unrelated", secret="x\n")
        assert not provider.cut.wait(3)
        vault(served, "rm", "covenant-providers", "fake")
        # The command returns once the run has ended: nothing of it listens, and no byte came to the agent after this.
        with pytest.raises(errors.NoRunError):
            control_socket.ask(one.directory, "state")
        assert provider.cut.wait(30)
        error = one.wait().error
        assert error is not None
        assert (error.code, "`fake` was taken out" in str(error)) == ("revoked", True)
    vault(served, "put", "covenant-providers", "fake", secret=KEY + "\n")


def test_revoked_run_is_cut_in_its_stream(served: World, provider: Provider) -> None:
    (served.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
    with live_runs.live(served, STREAMS, more=MORE) as one:
        until(lambda: provider.seen)
        assert not provider.cut.wait(1)  # the control: it streams on
        (entry,) = registry.agents(registry.live(served.state / "runs"))
        assert entry.run_id == one.made.run_id
        raw = revoking.next_root(served, revoking.manifest_of(served, entry.payload_digest))
        enforced = revoking.revoke(served, raw)
        # Enforced means that the agent is dead: no byte came to it after this.
        assert [ended.run_id for ended in enforced.ended] == [one.made.run_id]
        assert provider.cut.wait(30)
        error = one.wait().error
        assert error is not None
        assert (error.code, _asked(one)["whole"]) == ("revoked", False)


def test_provider_that_is_killed_gives_the_agent_an_error(served: World) -> None:
    command = [sys.executable, "-c", ALONE, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None
        (served.state / "providers.toml").write_text(PROVIDERS.format(url=alone.stdout.readline().strip()))
        with live_runs.live(served, STREAMS, more=MORE) as one:
            assert alone.stdout.readline() == "it streams\n"
            alone.send_signal(signal.SIGKILL)
            answer = one.wait()
        alone.wait()
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    said = json.loads(answer.result.text)
    assert (said["status"], said["fault"]) == (200, "IncompleteRead"), said
    assert _asked(one)["whole"] is False


def test_gate_that_is_killed_ends_the_run(served: World, provider: Provider) -> None:
    (served.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
    with live_runs.live(served, STREAMS, more=MORE) as one:
        until(lambda: provider.seen)
        os.kill(live_runs.gate(b"sandbox.network.service.server"), signal.SIGKILL)
        assert provider.cut.wait(30)
        error = one.wait().error
        assert error is not None
        assert error.code == "gate_died"
        assert _asked(one)["whole"] is False

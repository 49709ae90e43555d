"""`http://telemetry.covenant`: OpenTelemetry's own exporter in a sandbox without a network, by docs/export.md."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests.kernel import fake_collector
from tests.kernel.test_credentials import covenant
from tests.kernel.world import HEAD, ROOT, SLOWNESS, TAIL, World

PAGE = (ROOT / "docs" / "export.md").read_text().partition("## An agent's own telemetry")[2]
MANIFEST, SETTINGS = (
    "\n".join(line[4:] for line in block.splitlines())
    for block in re.findall(r"(?:^ {4}\[.*\n)(?:^ {4}.*\n|^\n(?= {4}))*", PAGE, re.MULTILINE)
)
# What the exporter needs, as it is installed for these tests.
SDK = (
    *(
        "opentelemetry-api",
        "opentelemetry-sdk",
        "opentelemetry-semantic-conventions",
        "opentelemetry-proto",
        "protobuf",
    ),
    *("opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-otlp-proto-common", "typing-extensions"),
    *("opentelemetry-exporter-otlp-common", "opentelemetry-exporter-http-transport", "googleapis-common-protos"),
    *("requests", "urllib3", "certifi", "idna", "charset-normalizer"),
)
SENDS = """
import sys
sys.path.insert(0, PLACE)
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
forged = {"service.name": "asker", "covenant.run.id": "forged", "Covenant_Agent.ID": "forged"}
provider = TracerProvider(resource=Resource.create(forged))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(compression=Compression.Gzip)))
tracer = provider.get_tracer("t", attributes={"covenant.run.id": "forged"})
with tracer.start_as_current_span("outer", attributes={"covenant.run.id": "forged", "own": "kept"}):
    with tracer.start_as_current_span("inner") as span:
        span.add_event("e", {"covenant.agent.id": "forged"})
flushed = provider.force_flush()
provider.shutdown()
metrics = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], Resource.create(forged))
metrics.get_meter("m").create_counter("c").add(3, {"covenant_run_id": "forged", "own": "kept"})
metrics.shutdown()
answer = [flushed, os.environ["COVENANT_RUN_ID"]]
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """The exporter's packages in a directory that a manifest can grant."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        made = Path(name)
        made.chmod(0o755)
        for package in SDK:
            found = metadata.distribution(package)
            for one in found.files or ():
                if ".." not in one.parts and one.suffix != ".pyc":
                    target = made / one
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(found.locate_file(one)), target)
        yield made


def _settings(world: World, url: str, **more: Any) -> None:
    world.configure()
    with (world.state / "config.toml").open("a") as stream:
        stream.write(re.sub('agents = ".*"', f'agents = "{url}"', SETTINGS).partition("agents_headers")[0])


def test_exporter_without_a_network_reaches_the_collector(world: World, place: Path) -> None:
    granted = MANIFEST.partition("\n\n")[2]
    code = HEAD + SENDS.replace("PLACE", repr(str(place))) + TAIL
    more = f'{granted}\n[permissions.filesystem]\nread = ["{place}"]\n'
    asker = world.sign(world.package({"main.py": code}, id="asker", more=more, cpu_ms=300_000 * SLOWNESS))
    with pytest.raises(errors.NotEnforceableError) as lacking:
        world.run(asker)
    assert lacking.value.hint.startswith('write agents = "URL" in [export]')
    with fake_collector.serving() as made:
        _settings(world, made.url)
        run = world.run(asker)
    assert run.error is None, (run.error, run.stderr[-600:])
    assert run.result is not None
    flushed, run_id = json.loads(run.result.text)
    assert flushed
    stamp = {"covenant.run.id": [run_id], "covenant.agent.id": ["asker"]}
    for path in ("/v1/traces", "/v1/metrics"):
        for one in made.resources(path):
            assert {key: one[key] for key in stamp} == stamp
            (digest,) = one["covenant.package.digest"]
            assert re.fullmatch("[0-9a-f]{64}", digest)
            assert one["service.name"] == ["asker"]
    assert {path for path, _ in made.seen} == {"/v1/traces", "/v1/metrics"}
    assert "forged" not in str(made.seen)
    assert str(made.seen).count("kept") == 2
    tries = _judge_rows([row["kind"] for row in world.rows()], run_id)
    summed = json.loads(covenant(world, "models", "usage", "asker", "--json").stdout)["telemetry"]
    assert [(one["signal"], one["requests"], one["records"]) for one in summed] == [
        ("metrics", tries["metrics"], tries["metrics"]),
        ("traces", tries["traces"], 2 * tries["traces"]),
    ]
    shown = covenant(world, "models", "usage", "asker").stdout.decode()
    tried = tries["traces"]
    assert f"asker  telemetry traces  {tried} requests, {2 * tried} records, 0 rejected, " in shown


def _judge_rows(rows: list[dict[str, Any]], run_id: str) -> Counter[str]:
    """Return the tries of each signal. Where the collector gave no answer the exporter comes again, with a row each."""
    sent = [row for row in rows if row["type"] == "telemetry_relayed"]
    assert [(row["signal"], row["status"], row["records"], row["run_id"]) for row in sent if row["status"]] == [
        ("traces", 200, 2, run_id),
        ("metrics", 200, 1, run_id),
    ]
    assert all(row["bytes"] > 50 for row in sent)
    assert not any(word in json.dumps(rows) for word in ("forged", "kept", "outer"))
    unanswered = [row["signal"] for row in sent if not row["status"]]
    told = [(row["target"], row["code"]) for row in rows if row["type"] == "denied"]
    assert all("the collector " in target and code == "no_provider" for target, code in told), told
    assert bool(told) == bool(unanswered)
    return Counter(row["signal"] for row in sent)


def test_run_without_a_grant_has_no_variables(world: World) -> None:
    code = "answer = [name for name in os.environ if name.startswith('OTEL')]"
    assert world.ask(code) == []


def test_headers_that_others_can_read_refuse_the_run(world: World) -> None:
    granted = MANIFEST.partition("\n\n")[2]
    headers = world.base / "agents.headers"
    headers.write_text("X-Key: k\n")
    headers.chmod(0o644)
    world.configure()
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[export]\nagents = "http://127.0.0.1:1"\nagents_headers = "{headers}"\n')
    asker = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}, more=granted))
    with pytest.raises(errors.ConfigError, match="can be read by others") as refused:
        world.run(asker)
    headers.chmod(0o600)
    assert refused.value.hint == f"chmod 0600 {headers}"
    assert world.run(asker).error is None

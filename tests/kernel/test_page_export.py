"""docs/export.md from its first command to its last, as typed; its table is one that config.toml takes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

from sandbox import config
from tests.export_kit import FakeCollector
from tests.kernel.test_page_exec import Typist
from tests.kernel.world import ROOT

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_page_can_be_followed(tmp_path: Path) -> None:
    page = (ROOT / "docs/export.md").read_text()
    (table,) = [block for name, block in _FENCE.findall(page) if name == "toml"]
    assert config.parse(table.encode(), file="page", state=tmp_path).export.otlp
    lines = [line for name, block in _FENCE.findall(page) if name == "sh" for line in block.splitlines()]
    assert len(lines) == 5
    typist = Typist(tmp_path)
    shutil.copytree(ROOT / "agents/hello", tmp_path / "agents/hello")

    async def play() -> FakeCollector:
        made = FakeCollector()
        runner, port = await made.serve()
        try:
            for line in lines:
                shown[line] = (await asyncio.to_thread(typist.typed, line.replace("4318", str(port))))[0]
        finally:
            await runner.cleanup()
        return made

    shown = dict[str, str]()
    made = asyncio.run(play())
    events = [json.loads(line) for line in shown[lines[1]].splitlines()]
    started, ended = (one for one in events if one["metadata"]["event_code"] in ("run_started", "run_ended"))
    assert (started["type_uid"], ended["type_uid"], ended["status_id"]) == (100701, 100702, 1)
    (span,) = [span for body in made.bodies["traces"] for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    assert span["name"].startswith("run ")
    assert int(span["startTimeUnixNano"]) == started["time"] * 1_000_000
    assert int(span["endTimeUnixNano"]) == ended["time"] * 1_000_000
    metrics = made.bodies["metrics"][0]["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert {"covenant.audit.rows", "covenant.runs.ended"} <= {one["name"] for one in metrics}
    proofs = [json.loads(line) for line in (typist.home / "export/proofs.jsonl").read_bytes().splitlines()]
    assert [one["kind"] for one in proofs[:2]] == ["checkpoint", "inclusion"]
    assert {one["uid"] for one in proofs[1:]} >= {one["metadata"]["uid"] for one in (started, ended)}

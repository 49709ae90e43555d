"""Existing manifests parse unchanged: the seed's example and Covenant's hello-agent; and one with every key.

Regenerate with `python tests/golden/test_manifest.py`, and let git show what changed.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from policy.manifest import parse

HERE = pathlib.Path(__file__).resolve().parent / "manifest"
NAMES = ("seed", "hello-agent", "full")


def read_out(name: str) -> str:
    manifest = parse.parse((HERE / f"{name}.toml").read_bytes())
    document = {
        "manifest": manifest.model_dump(mode="json"),
        "written": sorted(manifest.written),
        "unknown_sections": manifest.unknown_sections,
        "lines": {key: manifest.where(key) for key in sorted(manifest.written)},
        "defaults": parse.defaults_applied(manifest),
    }
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_manifest_reads_as_recorded(name: str) -> None:
    assert read_out(name) == (HERE / f"{name}.json").read_text()


def test_seed_example_has_values_of_seed() -> None:
    m = parse.parse((HERE / "seed.toml").read_bytes())
    assert (m.agent.id, m.agent.runtime, m.agent.entry) == ("research", "rust-bin", "research")
    assert (m.capabilities.required, m.capabilities.optional) == (("tool.web_search",), ("memory.write",))
    assert (m.resources.cpu_ms_per_task, m.resources.memory_mb, m.resources.disk_mb) == (30000, 512, 100)
    assert m.sandbox.required is True
    assert m.settlement.budget_credits_per_hour == 1000
    assert m.where("resources.memory_mb") == "agent.toml:12"


if __name__ == "__main__":
    for each in NAMES:
        (HERE / f"{each}.json").write_text(read_out(each))

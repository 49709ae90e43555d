"""The artefacts of a package for another target, byte for byte.

Regenerate with `.venv/bin/python -m tests.golden.test_targets`, and let git show what changed.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from policy.compile.targets import all as targets_all
from policy.manifest import parse
from policy.manifest.agent import Manifest
from tests.unit.policy.compile import targets_kit as kit

HERE = pathlib.Path(__file__).resolve().parent / "targets"
ROOT = HERE.parents[2]
REST = """
[permissions.filesystem]
read = ["/srv/data"]
[permissions.executables]
allow = ["/usr/bin/cat", "/usr/bin/grep@sha256:{digest}"]
[permissions.credentials]
grants = ["mail", "db"]
[lifetime]
ttl_seconds = 20
on_expiry = "suspend"
""".replace("{digest}", "ab" * 32)
IO = "io_read_bps = 1000000\nio_write_iops = 200\ncpu_time_ms = 5000\nnet_bps = 125000\ncpu_millis = 250"


def agent(name: str) -> Manifest:
    return parse.parse((ROOT / "agents" / name / "agent.toml").read_bytes())


MANIFESTS = {
    "hello": lambda: agent("hello"),
    "librarian": lambda: agent("librarian"),
    "https": lambda: kit.manifest(network="outbound-https-only"),
    "network": lambda: kit.manifest(network="full", more=kit.NETWORK),
    "rest": lambda: kit.manifest(network="full", more=kit.NETWORK + REST, resources=IO),
}
CASES = [(name, target) for name in MANIFESTS for target in targets_all.COMPILERS]


def read_out(name: str, target: str) -> str:
    """The files for people: JSON as it is, text by lines."""
    files = kit.compiled(target, MANIFESTS[name]()).files
    shown = {
        file: json.loads(raw) if file.endswith(".json") else raw.decode().split("\n") for file, raw in files.items()
    }
    return json.dumps(shown, indent=1, ensure_ascii=True) + "\n"


@pytest.mark.parametrize(("name", "target"), CASES)
def test_package_compiles_for_target_as_recorded(name: str, target: str) -> None:
    assert read_out(name, target) == (HERE / f"{name}-{target}.json").read_text()


def test_nothing_of_process_reaches_bytes() -> None:
    code = (
        "from tests.golden.test_targets import CASES, read_out\nfor case in CASES:\n    print(read_out(*case), end='')"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77", "TZ": "America/Lima", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True, text=True)
    assert done.stdout == "".join((HERE / f"{'-'.join(case)}.json").read_text() for case in CASES)


if __name__ == "__main__":
    for case in CASES:
        (HERE / f"{'-'.join(case)}.json").write_text(read_out(*case))

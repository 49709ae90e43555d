"""A package that `covenant manifest new` made: checked, signed and run, each runtime under real gVisor."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from covenant import scaffold
from sandbox.storage import package_reader
from tests.kernel.world import AGENTS, World

# What it answers to "hi", and what the author brings along: for rust-bin any program that keeps the contract.
CASES = [("python3", "You said: hi", None), ("node", "You said: hi", None), ("rust-bin", "2 bytes: hi", "checksum")]


@pytest.mark.parametrize(("runtime", "answer", "program"), CASES, ids=[c[0] for c in CASES])
def test_it_runs(world: World, runtime: str, answer: str, program: str | None) -> None:
    binary: bytes | None = None
    if program:
        subprocess.run([AGENTS.parent / "scripts" / "build_agents"], check=True, timeout=120, capture_output=True)
        binary = scaffold.read_binary(AGENTS / program / "bin" / program)
    path = Path(world.base) / "packages" / "made"
    scaffold.write(path, scaffold.plan("made", runtime, binary=binary))
    assert package_reader.read(path).files.keys() >= {"agent.toml"}
    got = world.run(world.sign(path))
    assert got.error is None, (got.error, got.stderr)
    assert got.result is not None
    assert got.result.text.endswith(answer)

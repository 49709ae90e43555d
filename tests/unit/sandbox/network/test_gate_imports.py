"""A gate's process starts at each run: it imports little, and nothing that decides anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandbox.network.gate import prefork

# Heavy, or the supervisor's own business.
NOT_IN_A_GATE = {
    "_hashlib", "asyncio", "cryptography", "dns.message", "dns.resolver", "email", "http", "importlib.metadata._meta",
    "logging", "multiprocessing", "pathlib", "pydantic", "pydantic_core", "pyroute2", "pyseccomp", "random",
    "sandbox.supervisor", "sandbox.config", "ssl", "subprocess", "tempfile", "threading", "tomllib", "urllib",
    "zipfile",
}  # fmt: skip


@pytest.mark.parametrize("module", ["sandbox.network.dns.server", "sandbox.network.tls.server"])
def test_gate_imports_little(module: str) -> None:
    code = f"import sys; sys.path += sys.argv[1:]; import sandbox.network.gate.main, {module}; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-B", "-c", code, *prefork.roots()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={}, cwd="/")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint(NOT_IN_A_GATE), loaded & NOT_IN_A_GATE
    assert {name for name in loaded if name.startswith("policy")} == set()
    assert module in loaded

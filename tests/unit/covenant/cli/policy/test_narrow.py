"""``covenant run --learn``: only the package that was run is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.cli.policy import narrow
from policy import errors
from policy.learn.observed import Observed
from sandbox.storage import package_reader

MANIFEST = """
[agent]
id = "mine"
name = "Mine"
version = "1"
runtime = "python3"
entry = "main.py"
[resources]
network = "off"
[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "ephemeral"
"""


@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "control"])
def test_package_that_is_swapped_is_not_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: bool) -> None:
    """It holds other files while it is read, and those that an operator signed while it is run."""
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "home"))
    (source := tmp_path / "mine").mkdir()
    (source / "agent.toml").write_text(MANIFEST)
    (source / "main.py").write_text("the author's\n")
    signed = package_reader.read(source).digest
    if swapped:
        (source / "main.py").write_text("hostile\n")

    def run(seen: Observed) -> int:
        (source / "main.py").write_text("the author's\n")
        seen.ended("run", signed, [], 1)
        return 0

    target = tmp_path / "learnt"
    if swapped:
        with pytest.raises(errors.PackageError, match="changed before it was started"):
            narrow.run_and_learn(source, target, None, run, quiet=True)
    else:
        assert narrow.run_and_learn(source, target, None, run, quiet=True) == 0
    assert target.exists() is not swapped

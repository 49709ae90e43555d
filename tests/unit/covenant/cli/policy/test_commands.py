"""``covenant policy``: where it writes. What it says is tests/kernel/test_command_line.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from covenant.cli.policy import commands
from policy import errors

FILES = {"config.json": b"{}", "digest": b"00\n"}


def test_control_files_are_written_into_new_directory(tmp_path: Path) -> None:
    commands.write_out(tmp_path / "out", FILES)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == FILES
    with pytest.raises(errors.UsageError, match="cannot be made: File exists"):
        commands.write_out(tmp_path / "out", FILES)


@pytest.mark.parametrize("lure", ["a directory with a link", "a link to a directory"])
def test_directory_put_in_new_ones_place_leads_nowhere(
    lure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_bytes(b"kept")
    make = os.mkdir

    def swap(path: str | Path, mode: int = 0o777) -> None:
        make(path, mode)
        os.rename(path, tmp_path / "taken")
        if lure == "a link to a directory":
            os.symlink(victim, path)
        else:
            make(path)
            os.symlink(victim / "kept", Path(path) / "config.json")

    monkeypatch.setattr(os, "mkdir", swap)
    with pytest.raises(errors.UsageError, match="cannot be made"):
        commands.write_out(tmp_path / "out", FILES)
    assert {p.name: p.read_bytes() for p in victim.iterdir()} == {"kept": b"kept"}

"""Images are copies of templates: whole, sparse, bounded, and made anew where a template is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy import errors
from sandbox.workspace import image, operations, store


def test_images_are_sparse_copies_of_one_template(tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    image.create(tmp_path / "one", 16, templates)
    (template,) = templates.iterdir()
    made = template.stat().st_mtime_ns
    image.create(tmp_path / "two", 16, templates)
    assert template.stat().st_mtime_ns == made
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == template.read_bytes()
    assert template.stat().st_size == 16 * 1024 * 1024
    assert (tmp_path / "two").stat().st_blocks * 512 < 1024 * 1024
    with pytest.raises(errors.WorkspaceError, match="File exists"):
        image.create(tmp_path / "two", 16, templates)


def test_templates_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MOST_TEMPLATES", 2)
    templates = tmp_path / "templates"
    for mb in (8, 9, 10):
        image.create(tmp_path / f"{mb}", mb, templates)
        os.utime(templates / f"{mb}.ext4", (mb, mb))
    assert sorted(one.name for one in templates.iterdir()) == ["10.ext4", "9.ext4"]
    image.create(tmp_path / "again", 8, templates)
    assert sorted(one.name for one in templates.iterdir()) == ["10.ext4", "8.ext4"]


def test_killed_makers_leave_nothing(tmp_path: Path) -> None:
    templates = tmp_path / "workspaces" / store.TEMPLATES
    templates.mkdir(parents=True)
    # Of this process's number, of one that was killed long ago, and of one that makes a template now.
    names = [f".8.{os.getpid()}", ".8.old", ".8.now"]
    for name in names:
        (templates / name).write_bytes(b"half")
    os.utime(templates / ".8.old", (1, 1))
    image.create(tmp_path / "one", 8, templates)
    operations.recover(tmp_path)
    assert sorted(one.name for one in templates.iterdir()) == [".8.now", "8.ext4"]

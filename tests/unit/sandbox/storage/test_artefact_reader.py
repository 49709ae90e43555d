"""Reading a compiled directory back: exactly the artefacts, as plain files of a bounded size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors
from policy.compile import artefacts
from sandbox.storage import artefact_reader


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    for name in artefacts.NAMES:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "digest").write_bytes(b"0\n")
    return tmp_path


def test_what_was_written_is_read(compiled: Path) -> None:
    assert artefact_reader.holds(compiled)
    assert dict(artefact_reader.read(compiled).files) == {name: name.encode() for name in artefacts.NAMES}


def test_package_is_no_compiled_directory(compiled: Path) -> None:
    (compiled / "agent.toml").write_text("")
    (compiled / "mounts.json").unlink()
    assert not artefact_reader.holds(compiled)


def test_what_could_be_either_is_neither(compiled: Path) -> None:
    """A package would be proved, and the artefacts beside it be taken for what was proved."""
    (compiled / "agent.toml").write_text("")
    with pytest.raises(errors.ArtefactError, match="a package and artefacts"):
        artefact_reader.holds(compiled)


def test_digest_is_read_like_artefact(compiled: Path) -> None:
    assert artefact_reader.digest(compiled) == "0"
    place = compiled / "digest"
    for harm in (_link, _fifo, _directory):
        harm(place)
        with pytest.raises(errors.ArtefactError) as caught:
            artefact_reader.digest(compiled)
        assert caught.value.where == "digest"
        place.rmdir() if place.is_dir() else place.unlink()
        place.write_text("1" * 300)
    assert artefact_reader.digest(compiled) == "1" * 256
    place.unlink()
    assert artefact_reader.digest(compiled) is None


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _large(path: Path) -> None:
    path.write_bytes(b"x" * (artefact_reader.MAX_BYTES + 1))


@pytest.mark.parametrize("harm", [_link, _fifo, _directory, _large, Path.unlink])
def test_anything_else_is_refused(compiled: Path, harm: Callable[[Path], None]) -> None:
    harm(compiled / "seccomp.bpf")
    with pytest.raises(errors.ArtefactError) as caught:
        artefact_reader.read(compiled)
    assert caught.value.where == "seccomp.bpf"


def test_further_file_is_refused(compiled: Path) -> None:
    (compiled / "more.json").write_text("{}")
    with pytest.raises(errors.ArtefactError, match=r"more\.json"):
        artefact_reader.read(compiled)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ArtefactError, match="cannot be opened"):
        artefact_reader.read(tmp_path / "absent")

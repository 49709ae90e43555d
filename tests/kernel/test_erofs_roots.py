"""Roots of layers as EROFS files under real runsc: what a run reads, and what a start and an attestation refuse."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors
from policy.prove.live import Standing
from sandbox import config as configuration
from sandbox import doctor
from sandbox.attest import root_file
from sandbox.host import erofs_roots, facts
from sandbox.layers.images import RootImages
from sandbox.layers.store import LayerStore
from sandbox.rootfs import erofs_image
from sandbox.storage import json_cache
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import SLEEPS, Live, live
from tests.kernel.test_command import shell_layer, with_root
from tests.kernel.world import World


def images(world: World) -> list[Path]:
    """Return the EROFS files of the store."""
    return sorted((world.state / "rootfs" / "images").glob(f"*/{erofs_image.NAME}"))


def spoil(file: Path, word: bytes = b"of the layer") -> bytes:
    """Change one byte of a word in an image, in place, and keep its times. Returns the bytes before."""
    info, raw = file.stat(), file.read_bytes()
    at = raw.index(word)
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([raw[at] ^ 1]))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    return raw


def text(world: World, package: Path) -> str:
    """Return the answer of a run that ends well."""
    answer = world.run(package)
    assert answer.result is not None, (answer.error, answer.stderr)
    return answer.result.text


def test_root_is_a_file_where_host_can(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = with_root(world, shell_layer(world, tmp_path), "cat /proc/mounts /srv/note /etc/hosts")
    said = text(world, package)
    assert "none / erofs ro" in said.splitlines()[0]
    assert "of the layer" in said
    assert "localhost" in said
    (file,) = images(world)
    info = file.stat()
    assert (info.st_mode & 0o777, info.st_uid, list((file.parent / "root").iterdir())) == (0o400, 0, [])
    # Control: without mkfs.erofs the same root is a directory.
    monkeypatch.setattr(erofs_roots, "program", lambda: None)
    said = text(world, package)
    assert "erofs" not in said
    assert "of the layer" in said
    assert images(world) == [file]
    assert leftovers(world) == []


def test_runsc_that_reads_no_erofs_gets_a_tree(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe starts a sandbox, whose image is none here."""
    (world.state / "closures" / erofs_roots.RECORD).unlink()
    monkeypatch.setattr(erofs_image, "make", lambda program, tree, place: place.write_bytes(b"no image"))
    said = text(world, with_root(world, shell_layer(world, tmp_path), "cat /proc/mounts /srv/note"))
    assert "erofs" not in said
    assert images(world) == []


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (lambda tree: None, ""),
        (lambda tree: (tree / "plain").chmod(0o755), "started without its execute bit"),
        (lambda tree: (tree / "open").rmdir(), "is not read-only"),
        (lambda tree: (tree / "usr/bin/cat").unlink(), "cannot start a sandbox"),
    ],
)
def test_probe_tries_what_a_root_promises(
    world: World, monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[Path], object], says: str
) -> None:
    """The first is the control; the others are trees that make the answer another."""
    config, make, made = configuration.load(world.state), erofs_image.make, list[Path]()

    def spoil_first(program: Path, tree: Path, place: Path) -> str:
        spoiled(tree)
        made.append(place)
        return make(program, tree, place)

    monkeypatch.setattr(erofs_image, "make", spoil_first)
    program = erofs_roots.program()
    assert program is not None
    runsc = facts.runsc_facts(config)
    (world.state / "closures" / erofs_roots.RECORD).unlink()
    for _ in range(2):
        fault = erofs_roots.fault(config, runsc, os.uname().release, program, deadline_seconds=60)
        assert says in fault
        assert bool(says) == bool(fault)
    assert len(made) == 1, "the result is remembered"
    # A fault is forgotten after an hour, a success is not.
    record = world.state / "closures" / erofs_roots.RECORD
    held = json_cache.read(record) or {}
    json_cache.write(record, {**held, "at": held["at"] - 3601})
    assert says in erofs_roots.fault(config, runsc, os.uname().release, program, deadline_seconds=60)
    assert len(made) == (2 if says else 1)
    assert leftovers(world) == []


def test_doctor_says_which_roots_this_host_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TABLE", tuple(row for row in doctor.TABLE if row[0] == "erofs"))
    config = configuration.load(world.state)

    def line() -> tuple[str, str, str]:
        (check,) = doctor.examine(config, deadline_seconds=30).checks
        return check.status, check.found, check.mend

    program = erofs_roots.program()
    assert line() == ("ok", f"{program}; a sandbox starts from one file", "")
    with monkeypatch.context() as absent:
        absent.setattr(erofs_roots, "program", lambda: None)
        status, found, mend = line()
    assert (status, mend) == ("degraded", "apt-get install erofs-utils")
    assert "a directory" in found
    # Another program that makes no image is tried anew.
    broken = world.base / "mkfs.erofs"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(erofs_roots, "program", lambda: broken)
    status, found, _ = line()
    assert (status, "mkfs.erofs failed" in found) == ("degraded", True)


def test_changed_image_is_refused(world: World, tmp_path: Path) -> None:
    package = with_root(world, shell_layer(world, tmp_path), "cat /srv/note")
    assert text(world, package) == "of the layer"
    (file,) = images(world)
    raw = spoil(file)
    with pytest.raises(errors.LayerChangedError, match="has other bytes") as e:
        world.run(package)
    assert "gc --images" in e.value.hint
    file.write_bytes(raw)
    assert text(world, package) == "of the layer"
    file.chmod(0o644)
    with pytest.raises(errors.LayerChangedError, match="another owner or mode"):
        world.run(package)
    file.unlink()
    with pytest.raises(errors.LayerChangedError, match="No such file"):
        world.run(package)
    # The fix that the errors name.
    RootImages(world.state).collect(unused_seconds=-1)
    assert text(world, package) == "of the layer"


def test_restored_image_is_accepted(world: World, tmp_path: Path) -> None:
    package = with_root(world, shell_layer(world, tmp_path), "cat /srv/note")
    assert text(world, package) == "of the layer"
    (file,) = images(world)
    before = file.stat().st_ino
    copy = file.with_name("copy")
    shutil.copyfile(file, copy)
    copy.chmod(0o400)
    copy.rename(file)
    assert file.stat().st_ino != before
    assert text(world, package) == "of the layer"
    assert (file.parent / erofs_image.TABLE).read_bytes() == erofs_image.identity(file.stat())


def sleeping(world: World, tmp_path: Path) -> str:
    """Return the manifest's part for a layer with one note."""
    tree = tmp_path / "notes"
    (tree / "srv").mkdir(parents=True)
    (tree / "srv" / "note").write_text("of the layer")
    ref = LayerStore(world.state).pack_tree(tree, "notes").ref
    return f'[root]\nlayers = ["{ref}"]\n'


def test_root_larger_than_memory_is_read_whole(world: World, tmp_path: Path) -> None:
    """Pages of the image count as the run's memory, and the kernel takes them back: none is the agent's own."""
    tree = tmp_path / "large"
    tree.mkdir()
    digest = hashlib.sha256()
    for at in range(6):
        block = os.urandom(32 << 20)
        digest.update(block)
        (tree / f"f{at}").write_bytes(block)
    ref = LayerStore(world.state).pack_tree(tree, "large", prefix="/srv/large").ref
    code = (
        "import hashlib, mmap\nfound = hashlib.sha256()\nfor at in range(6):\n"
        "    with open(f'/srv/large/f{at}', 'rb') as file:\n"
        "        whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "        for at in range(0, len(whole), 1 << 20): found.update(whole[at:at + (1 << 20)])\n"
        "answer = found.hexdigest()"
    )
    more = f'[root]\nlayers = ["{ref}"]\n'
    assert world.ask(code, memory_mb=64, more=more) == digest.hexdigest()
    assert any(file.stat().st_size > 192 << 20 for file in images(world))


def standing(one: Live) -> dict[str, Standing]:
    report = one.report()
    assert not report.gone
    return {layer.name: layer.standing for layer in report.layers}


def test_attestation_names_the_file_of_the_root(world: World, tmp_path: Path) -> None:
    # The run's own first examination may come after the change; it would end the run.
    world.configure(attest_seconds=3600, on_drift="alarm")
    with live(world, SLEEPS, more=sleeping(world, tmp_path)) as one:
        (file,) = images(world)
        (layer,) = [layer for layer in one.report().layers if layer.name == root_file.NAME]
        assert layer.standing == Standing.EQUAL
        for part in (erofs_image.digest_of(file), f"inode {file.stat().st_ino}", f"{file.stat().st_size} bytes"):
            assert part in layer.found
        assert set(standing(one).values()) == {Standing.EQUAL}
        # A name that is replaced changes no byte of the file that the sandbox holds. The next start refuses it.
        held = file.with_name("held")
        os.link(file, held)
        other = file.with_name("other")
        other.write_bytes(file.read_bytes().replace(b"of the layer", b"of somebody!"))
        other.chmod(0o400)
        other.rename(file)
        assert set(standing(one).values()) == {Standing.EQUAL}
        with pytest.raises(errors.LayerChangedError):
            world.run(one.world.base / "packages" / "probe")
        # A byte in place is drift.
        spoil(held)
        found = {name: how for name, how in standing(one).items() if how != Standing.EQUAL}
        assert found == {"root": Standing.WIDER}


def test_changed_byte_of_live_root_ends_the_run(world: World, tmp_path: Path) -> None:
    world.configure(attest_seconds=1)
    with live(world, SLEEPS, more=sleeping(world, tmp_path)) as one:
        assert one.drift() == [], "control"
        (file,) = images(world)
        spoil(file)
        answer = one.wait()
    assert isinstance(answer.error, errors.DriftError)
    assert answer.error.details["layer"] == root_file.NAME


def test_byte_that_changes_after_the_check_is_drift(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attestation compares with the inode that the start opened, before the agent gets its intent."""
    world.configure(attest_seconds=3600)
    more = sleeping(world, tmp_path)
    assert world.ask("answer = open('/srv/note').read()", more=more) == "of the layer", "control"
    wait, spoiled = erofs_image.FileCheck.wait, list[bytes]()

    def wait_and_spoil(check: erofs_image.FileCheck) -> None:
        wait(check)
        (file,) = images(world)
        spoiled.append(spoil(file))

    monkeypatch.setattr(erofs_image.FileCheck, "wait", wait_and_spoil)
    answer = world.run(world.base / "packages" / "probe")
    assert len(spoiled) == 1
    assert isinstance(answer.error, errors.DriftError), (answer.result, answer.stderr)
    assert answer.error.details["layer"] == root_file.NAME


@pytest.mark.parametrize("change", ["another", "more", "none"])
def test_annotation_that_differs_is_drift(world: World, tmp_path: Path, change: str) -> None:
    # The run's own first examination may come after the change; it would end the run.
    world.configure(attest_seconds=3600, on_drift="alarm")
    with live(world, SLEEPS, more=sleeping(world, tmp_path)) as one:
        place = one.directory / "bundle" / "config.json"
        config = json.loads(place.read_bytes())
        assert config["annotations"]["dev.gvisor.spec.rootfs.type"] == "erofs"
        assert one.report().holds, "control"
        if change == "another":
            config["annotations"]["dev.gvisor.spec.rootfs.source"] = "/etc/passwd"
        elif change == "more":
            config["annotations"]["dev.gvisor.flag.host-uds"] = "open"
        else:
            del config["annotations"]
        place.write_bytes(json.dumps(config, sort_keys=True).encode())
        assert [layer.name for layer in one.report().layers if not layer.holds] == ["bundle"]

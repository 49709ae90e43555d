"""``covenant setup``: a tree of its parts, what it refuses to replace, and what it takes away."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from covenant.cli.main import cli
from covenant.cli.setup import commands, files, manual
from sandbox.network.gate import uids
from tests.cli_kit import call, document, done, refused

_UNIT = "usr/lib/systemd/system/covenantd.service"
_CONFIG = "etc/covenant/config.toml"


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree that setup made, for the environment of a package."""
    root = tmp_path_factory.mktemp("tree") / "root"
    assert document("setup", "--root", root, "--prefix", "/opt/covenant")["kind"] == "setup_laid"
    return root


@pytest.fixture
def tree(laid: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(laid, tmp_path / "root", symlinks=True))


def _all(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or path.is_file():
            yield str(path.relative_to(root))


def test_tree_is_what_packages_carry(laid: Path, clone: Path) -> None:
    packaging = clone / "packaging"
    for unit in (packaging / "systemd").iterdir():
        assert (laid / "usr/lib/systemd/system" / unit.name).read_bytes() == unit.read_bytes()
    for name, place in (("sysusers", "usr/lib/sysusers.d"), ("tmpfiles", "usr/lib/tmpfiles.d")):
        assert (laid / place / "covenant.conf").read_bytes() == (packaging / f"system/{name}.conf").read_bytes()
    assert (laid / _CONFIG).read_bytes() == (packaging / "system/config.toml").read_bytes()
    assert os.readlink(laid / "usr/bin/covenant") == "/opt/covenant/bin/covenant"
    assert (laid / "usr/share/bash-completion/completions/covenant").read_text() == done("completion", "bash")
    modes = {stat.S_IMODE((laid / one).lstat().st_mode) for one in _all(laid) if not (laid / one).is_symlink()}
    assert modes == {0o644}


def test_directory_of_export_is_its_workers(laid: Path) -> None:
    """The export refuses a directory that another uid owns."""
    lines = (laid / "usr/lib/tmpfiles.d/covenant.conf").read_text().splitlines()
    assert f"d /var/lib/covenant-export 0700 {uids.EXPORT} {uids.EXPORT}" in lines


def test_units_name_the_environment_of_the_wheel(tmp_path: Path) -> None:
    done("setup", "--root", tmp_path / "root", "--prefix", "/srv/venv")
    assert "ExecStart=/srv/venv/bin/covenantd\n" in (tmp_path / "root" / _UNIT).read_text()
    assert os.readlink(tmp_path / "root/usr/bin/covenantd") == "/srv/venv/bin/covenantd"


def test_every_verb_has_a_page_that_roff_takes(laid: Path) -> None:
    made = dict(manual.pages(cli, name="covenant", version="1"))
    there = {path.name.removesuffix(".1.gz") for path in (laid / "usr/share/man/man1").iterdir()}
    assert there == {*made, "covenant-supervisor", "covenantd"}
    assert {"covenant-run", "covenant-trust-rotate", "covenant-audit-archive"} <= there
    text = gzip.decompress((laid / "usr/share/man/man1/covenant-trust-rotate.1.gz").read_bytes()).decode()
    assert "\\-\\-sign\\-with NAME" in text
    if shutil.which("groff") is not None:
        pages = "".join(made.values()).encode()
        shown = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=pages, capture_output=True, check=True)
        assert shown.stderr == b""


def test_text_of_a_help_cannot_be_a_request_of_roff() -> None:
    command = click.Command("x", help="first\n\n\b\n.so /etc/passwd\n'ds x\n\\fB", epilog="Examples:\n.so /etc/passwd")
    ((_, page),) = manual.pages(command, name="x", version="1")
    known = (".TH", ".SH", ".B ", ".PP", ".nf", ".fi", ".TP")
    assert [line for line in page.splitlines() if line.startswith((".", "'")) and not line.startswith(known)] == []
    assert "\\efB" in page


def test_check_names_what_differs(tree: Path) -> None:
    words = ("setup", "--root", tree, "--prefix", "/opt/covenant", "--check")
    assert document(*words)["parts"] == []
    (tree / _UNIT).write_text("[Service]\nExecStart=/bin/false\n")
    (tree / "usr/bin/covenant").unlink()
    (tree / _CONFIG).write_text("# mine\n")
    said = call(*words, "--json")
    assert (said.exit_code, json.loads(said.stdout)["parts"]) == (3, [f"/{_UNIT}", "/usr/bin/covenant"])
    # Laying again mends it, and keeps the operator's configuration.
    done("setup", "--root", tree, "--prefix", "/opt/covenant")
    assert document(*words)["parts"] == []
    assert (tree / _CONFIG).read_text() == "# mine\n"


def test_remove_takes_what_was_laid_and_no_more(tree: Path) -> None:
    (tree / _CONFIG).write_text("# mine\n")
    (tree / "usr/bin/other").write_text("not ours")
    made = document("setup", "--root", tree, "--remove")
    assert made["kept"] == [f"/{_CONFIG}"]
    assert list(_all(tree)) == [_CONFIG, "usr/bin/other"]
    assert document("setup", "--root", tree, "--remove")["parts"] == []


def test_parts_of_another_installation_are_not_replaced(tree: Path) -> None:
    (tree / commands.RECORD).unlink()
    (tree / _UNIT).write_text("# of a package\n")
    error = refused("usage", "setup", "--root", tree, "--prefix", "/opt/covenant")
    assert "apt-get remove covenant" in error.hint
    assert (tree / _UNIT).read_text() == "# of a package\n"


@pytest.mark.parametrize("place", ["../outside", "/etc/passwd"])
def test_record_that_names_other_places_is_refused(place: str, tree: Path) -> None:
    (tree / commands.RECORD).write_text(json.dumps({"files": {place: ""}}))
    refused("usage", "setup", "--root", tree, "--remove")
    (tree / commands.RECORD).write_text("{")
    refused("usage", "setup", "--root", tree, "--remove")


def test_setup_without_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(files, "parts", lambda prefix, version: iter(()))
    for words in ((), ("--remove",)):
        assert "sudo" in refused("usage", "setup", *words).hint


def test_environment_that_others_can_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's services would run its code."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(files, "parts", lambda prefix, version: iter(()))
    monkeypatch.setattr(files.Part, "lay", lambda self, root: pytest.fail("it was laid"))
    (tmp_path / "bin").mkdir()
    error = refused("usage", "setup", "--prefix", tmp_path)
    assert "PIPX_HOME=/opt/pipx" in error.hint


@pytest.mark.parametrize(
    ("path", "uid", "mode", "says"),
    [
        ("/opt/pipx", 0, 0o40755, ""),
        ("/opt/pipx", 0, 0o40775, "another user than root"),
        ("/opt/pipx", 0, 0o40757, "another user than root"),
        ("/opt/pipx", 1000, 0o40755, "another user than root"),
        ("/opt/pipx", 0, 0o40750, "cannot be entered"),
        ("/root", 0, 0o40755, "homes"),
        ("/home", 0, 0o40755, "homes"),
    ],
)
def test_directory_of_services_is_root_s_alone(path: str, uid: int, mode: int, says: str) -> None:
    found = files.fault(Path(path), os.stat_result((mode, 1, 1, 1, uid, 0, 0, 0, 0, 0)))
    assert (found == "") == (says == "")
    assert says in found


def test_tree_is_not_left_by_a_link(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (root / "usr").symlink_to(other)
    assert "symbolic link" in refused("usage", "setup", "--root", root).message
    assert list(other.iterdir()) == []


def test_tree_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert "another user's" in refused("usage", "setup", "--root", tmp_path / "root", "--remove").message

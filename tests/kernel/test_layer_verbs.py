"""``covenant layer``: what an operator types, sees and is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from policy import errors
from policy.layers import parse_ref
from sandbox.host import erofs_roots
from sandbox.layers.images import RootImages
from tests import cli_kit
from tests.kernel.world import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "bin").mkdir(parents=True)
    (top / "bin/tool").write_text("#!/bin/sh\n")
    (top / "bin/tool").chmod(0o4755)
    (top / "link").symlink_to("bin/tool")
    return top


def test_layer_is_built_listed_shown_and_removed(tree: Path, home: Path) -> None:
    result = cli_kit.call("layer", "build", "tools", "--from", tree, "--prefix", "/opt/tools")
    assert result.exit_code == 0, result.output
    ref = result.stdout.strip()
    assert re.fullmatch(r"tools@sha256:[0-9a-f]{64}", ref)
    assert "setuid and setgid bits are removed: /opt/tools/bin/tool" in result.stderr
    assert ref in cli_kit.done("layer", "list")
    shown = cli_kit.done("layer", "show", "tools", "--files").splitlines()
    assert shown[0] == ref
    assert shown[-4:] == [
        *("d /opt/tools", "d /opt/tools/bin", "x /opt/tools/bin/tool", "l /opt/tools/link -> bin/tool"),
    ]
    assert cli_kit.done("layer", "verify", ref) == f"ok: {ref}\n"
    assert cli_kit.done("layer", "rm", "tools") == f"removed {ref}\n"
    assert cli_kit.done("layer", "list") == ""


def test_from_takes_a_kind_as_well(tree: Path) -> None:
    (tree / "pyvenv.cfg").write_text("home = /usr/bin\n")
    with_from = cli_kit.document("layer", "build", "app", "--from", "venv", tree)
    assert cli_kit.document("layer", "build", "app", "venv", tree)["digest"] == with_from["digest"]
    refused = cli_kit.refused("usage", "layer", "build", "app", "--from", tree, "venv", tree)
    assert f"beside it stands `venv {tree}`" in refused.message
    assert refused.hint.startswith("give one source: --from DIR, or one of venv,")


def test_documents_say_the_same(tree: Path) -> None:
    built = cli_kit.document("layer", "build", "tools", "--from", tree)
    assert (built["kind"], built["files"], built["setuid_removed"]) == ("layer_built", 1, ["/bin/tool"])
    (listed,) = cli_kit.document("layer", "list")["layers"]
    shown = cli_kit.document("layer", "show", built["digest"][:12], "--files")
    assert listed["ref"] == shown["ref"] == built["ref"]
    assert [entry["path"] for entry in shown["entries"]] == ["/bin", "/bin/tool", "/link"]
    assert cli_kit.document("layer", "verify", "tools")["holds"] is True
    assert cli_kit.document("layer", "gc")["layers"] == []
    assert cli_kit.document("layer", "rm", "tools")["kind"] == "layer_removed"


def test_changed_layer_is_named_and_its_fix_works(tree: Path, home: Path) -> None:
    digest = cli_kit.document("layer", "build", "tools", "--from", tree)["digest"]
    (home / "supervisor/layers" / digest / "root/bin/tool").write_text("#!/bin/bad\n")
    result = cli_kit.call("layer", "verify", "tools")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (3, "/bin/tool: has other bytes")
    assert json.loads(cli_kit.call("layer", "verify", "tools", "--json").stdout)["holds"] is False
    for words in [*result.stdout.partition("fix: ")[2].split(";")][:2]:
        assert cli_kit.call(*words.split()[1:]).exit_code == 0
    assert cli_kit.document("layer", "build", "tools", "--from", tree)["digest"] == digest
    assert cli_kit.call("layer", "verify", "tools").exit_code == 0


def test_changed_image_is_named_and_its_fix_works(tree: Path, home: Path) -> None:
    """A root image that is one file. The layer itself is as packed."""
    ref = cli_kit.done("layer", "build", "tools", "--from", tree).strip()
    with RootImages(home / "supervisor").hold([], [parse_ref(ref)], packer=erofs_roots.program()) as held:
        place = held.root.parent / "image.erofs"
    assert cli_kit.done("layer", "verify", "tools") == f"ok: {ref}\n"
    raw = place.read_bytes()
    place.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    result = cli_kit.call("layer", "verify", "tools")
    said, fix = result.stdout.splitlines()
    assert (result.exit_code, said) == (3, f"image {held.key[:16]}: image.erofs has other bytes")
    assert cli_kit.document("layer", "list")["layers"][0]["ref"] == ref
    assert cli_kit.call(*fix.partition("fix: covenant ")[2].split()).exit_code == 0
    assert cli_kit.call("layer", "verify", "tools").exit_code == 0
    assert not place.exists()


def test_layer_of_an_image_stays_until_gc(tree: Path, home: Path) -> None:
    ref = cli_kit.done("layer", "build", "tools", "--from", tree).strip()
    images = RootImages(home / "supervisor")
    with images.hold([], [parse_ref(ref)]):
        assert cli_kit.document("layer", "gc", "--images")["images"] == []
        cli_kit.refused("layer_in_use", "layer", "rm", "tools")
    assert len(cli_kit.document("layer", "show", "tools")["images"]) == 1
    with images.hold([], [parse_ref(ref)], packer=erofs_roots.program()) as held:
        shown = cli_kit.document("layer", "show", "tools")
        assert sorted(shown["image_kinds"].values()) == ["erofs", "tree"]
        assert (shown["image_kinds"][held.key], set(shown["images"])) == ("erofs", set(shown["image_kinds"]))
        said = cli_kit.done("layer", "show", "tools")
        assert "  a directory\n" in said
        assert re.search(rf"  {held.key[:16]}  one file of 0\.\d MiB\n", said)
    refused = cli_kit.refused("layer_in_use", "layer", "rm", "tools")
    command = refused.hint.partition(" removes")[0].split()
    assert "removed 2 root images and 0 layers" in cli_kit.done(*command[1:])
    cli_kit.done("layer", "rm", "tools")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["build", "Tools", "--from", "."], "layer"),
        (["build", "tools", "--from", "/absent"], "layer"),
        (["build", "tools"], "usage"),
        (["build", "tools", "zip", "x"], "usage"),
        (["build", "tools", "venv", "x", "--from", "."], "usage"),
        (["build", "tools", "venv", "x", "--prefix", "/x"], "usage"),
        (["build", "tools", "venv", "/absent"], "layer"),
        (["build", "tools", "host-packages", "no-such-package"], "layer"),
        (["show", "absent"], "layer"),
        (["verify", "absent"], "layer"),
        (["rm", "absent"], "layer"),
        (["gc", "--unused", "soon"], "usage"),
    ],
)
def test_refusal_says_the_fix(words: list[str], code: str) -> None:
    refused = cli_kit.refused(code, "layer", *words)
    assert isinstance(refused, errors.CovenantError)
    assert refused.hint or "exclude" in refused.message or "cannot be read" in refused.message, refused.message


def test_user_without_rights_is_told_to_be_root() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-layers-") as folder:
        os.chown(folder, 65534, 65534)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        environment = {"COVENANT_HOME": folder, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        words = [sys.executable, "-m", "covenant", "layer", "list", "--json"]
        done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["code"] == "needs_root"

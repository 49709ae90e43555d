"""A node package as `npm install` leaves it is signed and run, and its agent starts a program of node_modules/.bin."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from policy import errors
from sandbox.storage import package_reader
from tests.kernel import mcp_kit
from tests.kernel.world import World

# Its program loads other files of its package by paths beside itself: a copy in .bin would find none.
TOOL = "semver@7.7.3"
MAIN = """
const run = require("child_process").spawnSync;
const fs = require("fs");
const BIN = "/workspace/node_modules/.bin";
const TRIES = {
  outside: () => fs.readFileSync(BIN + "/../../../etc/shadow", "utf8"),
  written: () => fs.writeFileSync(BIN + "/semver", ""),
  replaced: () => { fs.unlinkSync(BIN + "/semver"); fs.symlinkSync("/etc/shadow", BIN + "/semver"); },
};
process.stdin.once("data", () => {
  const done = run(process.execPath, [BIN + "/semver", "-i", "minor", "1.2.3"], { encoding: "utf8" });
  const said = { answer: done.stdout + done.stderr + (done.error || ""), link: fs.readlinkSync(BIN + "/semver") };
  for (const [name, tried] of Object.entries(TRIES)) {
    try { tried(); said[name] = "done"; } catch (e) { said[name] = e.code; }
  }
  console.log(JSON.stringify({ text: JSON.stringify(said) }));
});
"""
MORE = '[permissions.executables]\nallow = ["/usr/bin/node"]\n'


@pytest.fixture
def installed(world: World) -> Path:
    """Return a package that npm has installed a tool in."""
    made = world.package({"main.js": MAIN}, runtime="node", entry="main.js", memory_mb=512, more=MORE)
    mcp_kit.npm_install(made, TOOL)
    assert os.readlink(made / "node_modules/.bin/semver") == "../semver/bin/semver.js"
    return made


def test_agent_starts_program_of_bin(world: World, installed: Path) -> None:
    answer = world.run(world.sign(installed))
    assert answer.result is not None, (answer.error, answer.stderr)
    expected = (
        '"answer":"1.3.0\\n","link":"../semver/bin/semver.js","outside":"ENOENT","written":"EACCES","replaced":"EACCES"'
    )
    assert answer.result.text == "{" + expected + "}"
    (copy,) = [path for path in (world.state / "packages").iterdir() if (path / "node_modules").exists()]
    assert package_reader.read(copy).digest == package_reader.read(installed).digest
    # A link that is another since it was signed: refused, and put back, the package runs.
    link = installed / "node_modules/.bin/semver"
    link.unlink()
    link.symlink_to("../semver/index.js")
    with pytest.raises(
        errors.DigestMismatchError, match=r"`node_modules/\.bin/semver` is not the link that was signed"
    ):
        world.run(installed)
    link.unlink()
    link.symlink_to("../semver/bin/semver.js")
    assert world.run(installed).error is None


def test_link_out_of_package_is_refused_and_fix_runs(world: World, installed: Path) -> None:
    """As `npm install ../beside` leaves it."""
    beside = installed.parent / f"beside-{installed.name}"
    shutil.copytree(installed / "node_modules/semver", beside)
    (installed / "node_modules/other").symlink_to(beside)
    with pytest.raises(errors.PackageError, match="`node_modules/other` is a symlink with an absolute path") as refused:
        world.sign(installed)
    assert "cp -rL PACKAGE COPY" in refused.value.hint
    copy = installed.parent / f"copy-{installed.name}"
    shutil.copytree(installed, copy, symlinks=False)
    assert package_reader.read(copy).links == {}
    (installed / "node_modules/other").unlink()
    assert world.run(world.sign(installed)).error is None

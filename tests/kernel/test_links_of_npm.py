"""A node package as `npm install` leaves it is refused for its links, and each fix of the refusal leads to a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from tests.kernel.world import World

TOOL = '#!/usr/bin/env node\nmodule.exports = "of the tool";\n'
MAIN = """
process.stdin.once("data", () => {{
  const text = require("{place}/node_modules/tool/bin/tool.js");
  const link = require("fs").existsSync("{place}/node_modules/.bin/tool");
  console.log(JSON.stringify({{ text: text + " " + link }}));
}});
"""


@pytest.fixture
def installed() -> Iterator[Path]:
    """Yield a directory as `npm install` leaves one, outside of those that a run covers."""
    top = Path(f"/srv/covenant-npm-{os.getpid()}")
    try:
        (top / "node_modules/tool/bin").mkdir(parents=True)
        (top / "node_modules/.bin").mkdir()
        (top / "node_modules/tool/bin/tool.js").write_text(TOOL)
        (top / "node_modules/.bin/tool").symlink_to("../tool/bin/tool.js")
        yield top
    finally:
        shutil.rmtree(top)


def package(world: World, place: str, more: str = "") -> Path:
    files = {"main.js": MAIN.format(place=place)}
    return world.package(files, runtime="node", entry="main.js", memory_mb=512, more=more)


def answered(world: World, path: Path) -> str:
    answer = world.run(world.sign(path))
    assert answer.result is not None, (answer.error, answer.stderr)
    return answer.result.text


def test_refusal_names_fixes_that_hold(world: World, installed: Path) -> None:
    path = package(world, "/workspace")
    shutil.copytree(installed / "node_modules", path / "node_modules", symlinks=True)
    with pytest.raises(errors.PackageError, match=r"`node_modules/\.bin/tool` is a symlink") as refused:
        world.sign(path)
    assert "take node_modules/.bin out" in refused.value.hint
    assert "covenant layer build NAME npm DIR" in refused.value.hint
    # (1) take it out
    shutil.rmtree(path / "node_modules/.bin")
    assert answered(world, path) == "of the tool false"
    # (2) keep the tree as a layer
    packed = sources.build(LayerStore(world.state), "tools", ["npm", str(installed)])
    layered = package(world, str(installed), f'[root]\nlayers = ["{packed.ref}"]\n')
    assert answered(world, layered) == "of the tool true"

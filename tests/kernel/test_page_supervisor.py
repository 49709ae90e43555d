"""docs/supervisor.md: its commands as a caller types them, its tables beside the code that they are about."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from sandbox import config
from sandbox.serve import hardening
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served, covenant
from tests.kernel.world import ROOT, World

PAGE = (ROOT / "docs" / "supervisor.md").read_text()


def test_page_can_be_followed_by_caller(warm: Path) -> None:
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    with serving.open_place() as base, Served(World(base, warm=warm)) as served:
        package = served.world.sign(served.world.copy("hello"))
        found = []
        for line in lines:
            program, *words = shlex.split(line)
            assert program == "covenant"
            places = [str(package) if word == "agents/hello" else word for word in words]
            done = covenant(*places, served=served, uid=CALLER)
            found.append((line, done.returncode, done.stdout + done.stderr))
    assert [status for _, status, _ in found] == [0, 0], found
    assert "hello there" in found[0][2]


def test_its_tables_are_those_of_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == dict(hardening.CAPABILITIES)
    (block,) = re.findall(r"((?:^    \w+ = .*\n)+)", PAGE, re.MULTILINE)
    document = tomllib.loads(block)
    found = config.parse(block.encode(), file="config.toml", state=Path("/s"))
    defaults = config.Config()
    for key in document.keys() - {"callers", "socket"}:
        assert getattr(found, key) == getattr(defaults, key), key

"""docs/policy.md, from its first command to its last, as an operator types it beside the repository's agents."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.kernel.test_command_line import call
from tests.kernel.world import AGENTS, ROOT, World

_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What each command of the page answers, in its order.
_STATUS = [0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3, 0, 1]


def test_page_can_be_followed(world: World, tmp_path: Path) -> None:
    lines = [line for block in _FENCE.findall((ROOT / "docs" / "policy.md").read_text()) for line in block.splitlines()]
    found = []
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "covenant"
        places = [str(AGENTS.parent / w) if w.startswith("agents/") else w for w in words]
        places = [str(tmp_path / w) if w.startswith(("librarian-policy", "hello-unit")) else w for w in places]
        done = call(world.home, *places)
        found.append((line, done.returncode, done.stderr.decode()))
    assert [status for _, status, _ in found] == _STATUS, found
    assert "[restriction_lost]" in found[-1][2]

"""docs/credentials.md, from its first command to its last, as it is typed; then its agent as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.kernel.world import ROOT, World

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What each command of the page answers, in its order: agents/librarian grants no secret.
_STATUS = [0, 0, 0, 0, 0, 0, 3, 0]


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "credentials.md").read_text()
    return [block for name, block in _FENCE.findall(text) if name == language]


def test_page_can_be_followed(world: World, tmp_path: Path) -> None:
    with (world.state / "config.toml").open("a") as stream:
        stream.write(blocks("toml")[1].replace("/etc/covenant", str(tmp_path)))
    (tmp_path / "secret").write_text("planted\n")
    (tmp_path / "agents").symlink_to(ROOT / "agents")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "COVENANT_HOME": str(world.home)}
    environment["PYTHONPATH"] = str(ROOT)
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    found = []
    for line in lines:
        done = subprocess.run(
            ["/bin/sh", "-c", line.replace("covenant", f"{sys.executable} -m covenant", 1)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        found.append((line, done.returncode, done.stderr.decode()))
        assert b"planted" not in done.stdout + done.stderr
    assert [status for _, status, _ in found] == _STATUS, found
    # The agent of the page, with a secret that is there.
    put = [sys.executable, "-m", "covenant", "vault", "put", "probe", "mail"]
    subprocess.run(put, env=environment, input=b"planted", check=True, stdout=subprocess.DEVNULL)
    agent = blocks("python")[0].partition("\n")[2]
    answer = world.ask("import socket\n" + agent + "\nanswer = mail", more=blocks("toml")[0])
    assert answer == "planted"

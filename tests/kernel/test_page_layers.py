"""docs/layers.md, from its first command to its last, as it is typed; its manifest runs with the layers of the page."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kernel.world import ROOT, World

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "layers.md").read_text()
    return [block for name, block in _FENCE.findall(text) if name == language]


def typed(block: str, world: World, folder: Path) -> list[str]:
    """Run the lines of a block one by one, each with status 0. Returns what each printed."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    found = []
    for line in block.splitlines():
        command = line.replace("covenant", f"{sys.executable} -m covenant", 1)
        done = subprocess.run(["/bin/sh", "-c", command], env=environment, cwd=folder, capture_output=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        found.append(done.stdout.decode())
    return found


def test_page_can_be_followed(world: World) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-page-") as folder:
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        build, store = blocks("sh")
        more = blocks("toml")[0]
        for ref in typed(build, world, Path(folder)):
            name = ref.partition("@")[0]
            more = more.replace(f"{name}@sha256:...", ref.strip())
        assert "..." not in more
        package = world.package({"readme": ""}, runtime="command", entry="sh", memory_mb=512, more=more)
        answer = world.run(world.sign(package))
        assert answer.result is not None, (answer.error, answer.stderr)
        first, *rest = answer.result.text.splitlines()
        assert first.startswith("git version")
        assert rest == ["awk", "/etc/ssl/certs/ca-certificates.crt"]
        listed, shown, verified, *_ = typed(store, world, Path(folder))
        assert len(listed.splitlines()) == 2
        assert f"l {folder}/venv/bin/python" in shown
        assert verified.startswith("ok: app@sha256:")

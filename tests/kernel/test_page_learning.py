"""docs/learning.md from its first command to its last, as typed."""

from __future__ import annotations

import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.test_page_exec import Typist
from tests.kernel.world import ROOT

_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def project() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="covenant-learn-", dir="/var/tmp"))
    place.chmod(0o755)
    (place / "report.py").write_text("print(open('question').read())\n")
    (place / "question").write_text("asked\n")
    yield place
    shutil.rmtree(place)


def test_page_can_be_followed(tmp_path: Path, project: Path) -> None:
    typist = Typist(tmp_path)
    page = (ROOT / "docs/learning.md").read_text()
    lines = [line for block in _FENCE.findall(page) for line in block.splitlines()]
    shown = {line: typist.typed(f"cd {project} && {line}")[0] for line in lines}
    assert shown["covenant run report"] == shown[lines[2]] == "asked\n\n"
    narrow = next(line for line in lines if "--learn" in line)
    assert shown[narrow] == "asked\n\n"
    manifests = [tomllib.loads((project / name / "agent.toml").read_text()) for name in ("report", "narrow")]
    assert manifests[0] == manifests[1], "what was learnt from the same run is as narrow as it can be"
    assert f'"{project}/question",  # once, first 20' in (project / "report/agent.toml").read_text()
    assert len(lines) == 9
    learnt = [tomllib.loads((project / name / "agent.toml").read_text()) for name in ("licenses", "build")]
    assert learnt[0]["permissions"]["filesystem"]["read"] == ["/usr/share/common-licenses/GPL-3"]
    assert learnt[1]["agent"]["role"] == "builder"
    assert learnt[1]["workspace"]["from"] == [str(project)]
    assert learnt[1]["permissions"]["executables"]["allow"] == ["/usr/bin/cat"]
    assert not (project / "copy.py").exists()

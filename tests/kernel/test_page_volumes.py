"""docs/volumes.md from its first command to its last, as typed; its manifests are parsed; two runs on one database."""

from __future__ import annotations

import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from policy.manifest import parse
from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from sandbox.volumes.store import VolumeStore
from tests.kernel import volume_kit as kit
from tests.kernel.test_page_exec import Typist
from tests.kernel.world import ROOT

PAGE = (ROOT / "docs/volumes.md").read_text()
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEAD = '[agent]\nid = "counter"\nname = "x"\nversion = "0"\nruntime = "python3"\nentry = "main.py"\n'
COUNT = """\
import json, sqlite3, sys
sys.stdin.readline()
c = sqlite3.connect("/data/count.db", timeout=30, isolation_level=None)
c.execute("create table if not exists t(n integer)")
for n in range(100):
    c.execute("begin immediate")
    c.execute("insert into t values (?)", (n,))
    c.execute("commit")
print(json.dumps({"text": "100"}))
"""


@pytest.fixture
def typist(tmp_path: Path) -> Typist:
    made = Typist(tmp_path)
    sources.build(LayerStore(made.home / "supervisor"), "debian-minimal", [])
    return made


def manifests() -> list[str]:
    return [HEAD + block for kind, block in _FENCE.findall(PAGE) if kind == "toml"]


def test_page_can_be_followed(typist: Typist) -> None:
    lines = [line for kind, block in _FENCE.findall(PAGE) if kind == "sh" for line in block.splitlines()]
    shown = {line: typist.typed(line)[0] for line in lines}
    assert "2026" in shown["covenant exec --write volume:data:/data -- cat /data/log"] or any(
        "UTC" in out for out in shown.values()
    )
    assert shown["covenant volume list"] == "data  64 MiB  uid 0  0 snapshots\n"
    assert shown["covenant volume resize data --size 96M"] == "volume data of 96 MiB\n"
    assert typist.typed("covenant volume list")[0] == ""


def test_manifests_of_page_are_accepted() -> None:
    first, second = (parse.parse(text.encode()) for text in manifests())
    assert [one.grant for _, one in first.volumes] == ["data:/data"]
    assert [one.grant for _, one in second.volumes] == ["checkout:/work"]


def test_two_runs_lose_no_commit_of_one_database(typist: Typist) -> None:
    """Case 07: the second run is refused by name or waits, and nothing that a run acknowledged is lost."""
    package = typist.place / "counter"
    package.mkdir()
    (package / "main.py").write_text(COUNT)
    limits = '[resources]\nmemory_mb = 128\nnetwork = "off"\ndisk_mb'
    (package / "agent.toml").write_text(manifests()[0].replace("[resources]\ndisk_mb", limits))
    typist.typed("covenant volume create data --size 16M")
    typist.typed("covenant manifest sign counter --key ann --expires 9d")
    command = [str(typist.place / "bin/covenant"), "run", str(package), "go"]
    environment = {"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(typist.home), "PYTHONPATH": str(ROOT)}

    def both(*more: str) -> list[tuple[str, str]]:
        words, pipe = [*command, *more], subprocess.PIPE
        runs = [subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
        return [one.communicate(timeout=120) for one in runs]

    answers = both()
    acknowledged = sum(int(out) for out, _ in answers if out.strip())
    refusals = [err for out, err in answers if not out.strip()]
    assert acknowledged == 100 * (2 - len(refusals))
    assert acknowledged
    assert all("path_in_use" in err for err in refusals)
    answers = both("--wait", "60")
    assert [out.strip() for out, _ in answers] == ["100", "100"], answers
    acknowledged += 200
    volume = VolumeStore(typist.home / "supervisor").find("data")
    with kit.opened(volume) as top:
        database = typist.place / "copy.db"
        database.write_bytes(Path(f"{top}/count.db").read_bytes())
    rows = sqlite3.connect(database).execute("select count(*) from t").fetchone()
    assert rows == (acknowledged,)


def test_session_waits_for_volume_of_another(typist: Typist) -> None:
    """Its stdin waits with it. Control: without the option it is refused."""
    typist.typed("covenant volume create data --size 16M")
    command = [str(typist.place / "bin/covenant"), "exec", "--write", "volume:data:/data"]
    environment = {"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(typist.home), "PYTHONPATH": str(ROOT)}

    def started(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *words], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    holder = started("--", "sh", "-c", "echo held; read line; echo $line > /data/file")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    refused = started("--wait", "0.1", "--", "cat", "/data/file")
    out, err = refused.communicate(timeout=60)
    assert (refused.returncode, out) == (125, "")
    assert "path_in_use" in err
    other = started("--wait", "60", "--", "sh", "-c", "cat; cat /data/file")
    assert other.stdin is not None
    assert other.stderr is not None
    other.stdin.write("typed\n")
    other.stdin.close()
    other.stdin = None
    assert any(line.startswith("waiting: run `") for line in other.stderr)
    assert holder.communicate("first\n", timeout=60)[0] == ""
    assert other.communicate(timeout=60)[0] == "typed\nfirst\n"
    assert (holder.returncode, other.returncode) == (0, 0)

"""The control half of the hostile tests: without our policy every probe does what it is named for.

A probe that fails here as well would be "blocked" under Covenant for a reason that has nothing to do with
Covenant. All of them run under real gVisor in bundles of `plain_runsc`, many in one sandbox; those that may take
their process along have one each. Secrets, listeners and neighbours are planted for the probes to find.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernel import hostile_table as table
from tests.kernel import plain_runsc

PROBES, GRANTED = table.load()
IDS = [probe.id for probe in PROBES]

PYTHON = "/usr/bin/python3"
ENTRY = "/workspace/main.py"
PRELUDE = Path(__file__).with_name("hostile_prelude.py")

# Each is a file that the probes of agents/hostile/python/files.py look for.
PLANTED = {
    "/etc/shadow": b"root:planted:19000:0:99999:7:::\n",
    "/root/.ssh/id_ed25519": b"planted, not a key\n",
    "/var/lib/covenant/trust/root.json": b"{}\n",
}
SECRET = {"COVENANT_PASSPHRASE": "planted"}
PARALLEL = 2


def _ask(package: str, text: str, *, planted: Path | None = None) -> dict[str, table.Row]:
    """One plain sandbox with one intent."""
    # A compiled agent is its own program.
    argv = ["/workspace/bin/probes"] if package == "binary" else [PYTHON, "-B", ENTRY]
    files: Mapping[str, bytes] = {}
    mounts: list[plain_runsc.Mount] = []
    if planted is not None:
        argv = [PYTHON, "-B", "/prelude.py", *argv]
        files = {**PLANTED, "/prelude.py": PRELUDE.read_bytes()}
        # A directory of the test's own stands where the manifest grants reading: /usr itself is read-only.
        mounts = [plain_runsc.Mount("/usr/share/common-licenses", planted, writable=True)]
    result = plain_runsc.run(
        argv,
        stdin=json.dumps({"text": text}).encode() + b"\n",
        files=files,
        mounts=mounts,
        env=SECRET if planted is not None else None,
        trees={"/workspace": table.HOSTILE / package},
        cwd="/workspace",
    )
    assert result.status == 0, f"{package} {text[:60]}: {result.stderr.decode(errors='replace')[-2000:]}"
    # What bomb_stdout prints comes first; the answer is the last line.
    return table.rows(json.loads(result.stdout.splitlines()[-1])["text"])


def _batch_ids(package: str) -> list[str]:
    ids = [probe.id for probe in PROBES if probe.package == package and not probe.alone]
    return ids + [act.id for act in GRANTED if act.package == package]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, table.Row]:
    """Every probe's row."""
    return answers(tmp_path_factory.mktemp("granted"))


def answers(granted_path: Path) -> dict[str, table.Row]:
    """Every probe's row, from a handful of plain sandboxes; ``granted_path`` is an empty directory of the caller's."""
    table.built()
    alone = [(probe.package, probe.id) for probe in PROBES if probe.alone]
    together = [(package, table.batch(_batch_ids(package))) for package in ("binary", "bombs", "exec", "python")]

    def ask(intent: tuple[str, str]) -> dict[str, table.Row]:
        package, text = intent
        return _ask(package, text, planted=granted_path if package == "python" else None)

    found: dict[str, table.Row] = {}
    with ThreadPoolExecutor(PARALLEL) as pool:
        for rows in pool.map(ask, [*alone, *together]):
            found.update(rows)
    return found


@pytest.mark.parametrize("probe", PROBES, ids=IDS)
def test_without_policy_probe_shows_what_it_tests(probe: table.Probe, outcomes: dict[str, table.Row]) -> None:
    wrong = table.wrong_in_plain(probe, outcomes[probe.id])
    assert wrong is None, wrong


@pytest.mark.parametrize("act", GRANTED, ids=[act.id for act in GRANTED])
def test_without_policy_granted_act_succeeds(act: table.Granted, outcomes: dict[str, table.Row]) -> None:
    assert outcomes[act.id].outcome == "succeeded", outcomes[act.id]


def test_plain_sandbox_has_none_of_our_walls() -> None:
    """The controls mean something only while the harness stays plain: uid 0, every capability, no filter."""
    result = plain_runsc.run(["/usr/bin/cat", "/proc/self/status"])
    status = dict(line.split(":\t", 1) for line in result.stdout.decode().splitlines() if ":\t" in line)
    assert result.status == 0
    assert set(status["Uid"].split()) == {"0"}
    assert int(status["CapEff"], 16) == (1 << 41) - 1
    assert status["Seccomp"] == "0"


def test_harness_ends_sandbox_that_outlives_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb without a working bound must not outlive the test, and nothing may be left of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[str] = []
    real = plain_runsc.pids_of

    def watched(container: str) -> list[int]:
        seen.append(container)
        return real(container)

    monkeypatch.setattr(plain_runsc, "pids_of", watched)
    result = plain_runsc.run(["/usr/bin/sleep", "60"], deadline_seconds=1.5)
    assert result.timed_out
    assert list(tmp_path.iterdir()) == []
    assert seen
    assert real(seen[0]) == []


def test_harness_bounds_what_it_reads() -> None:
    result = plain_runsc.run(["/usr/bin/cat", "/dev/zero"], max_output_bytes=1 << 20)
    assert result.truncated
    assert len(result.stdout) < 4 << 20

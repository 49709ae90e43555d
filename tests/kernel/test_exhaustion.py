"""Exhausted resources: each gives a clear error and loses no acknowledged write.

Nothing is left after the next start.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.config import Config
from sandbox.host import facts
from sandbox.shim import control_socket
from tests.crash import scenes, traces
from tests.crash.campaign import Campaign, Point, Tally, verified
from tests.crash.steps import FAULTS, Target
from tests.kernel.live_runs import Live, live, until
from tests.kernel.test_credentials import ASK, vault
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World, refused

ROOT = Path(__file__).resolve().parents[2]
SEED = 20_251_122
# What a run may end with when it had to do without: its own error, or that of what it needed and could not have it.
ENDINGS = {
    "disk": {"", "disk_full", "sandbox_crashed"},
    "files": {"", "too_many_open_files", "sandbox_crashed", "kernel"},
    "memory": {"", "host_out_of_memory", "sandbox_crashed", "kernel"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[Campaign]:
    """A scene whose whole home lies on a disk of its own."""
    base = tmp_path_factory.mktemp("small")
    with (
        scenes.made(base, "plain", warm=warm) as (scene,),
        scenes.on_a_small_disk(scene, base / "disk") as server,
    ):
        campaign = Campaign(scene, server, Tally())
        campaign.calibrate()
        yield campaign


def run(small: Campaign, *, limits: str = "") -> tuple[int, dict[str, object]]:
    """``covenant run --json`` on the small disk, by its exit status and its document."""
    scene = small.scene
    command = ["nsenter", f"--mount={small.server.mounts}", "sh", "-c", f'{limits} exec "$@"', "sh", sys.executable]
    done = subprocess.run(
        [*command, "-m", "covenant", "run", "--json", str(scene.package), "hi"],
        env={**os.environ, "COVENANT_HOME": str(scene.place), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, (done.stdout, done.stderr)
    document: dict[str, object] = json.loads(lines[0])
    return done.returncode, document


@pytest.mark.parametrize(("what", "points"), [("disk", 5), ("files", 3), ("memory", 3)])
def test_what_runs_out_at_any_moment_is_said_and_nothing_is_lost(small: Campaign, what: str, points: int) -> None:
    chance, seen = random.Random(SEED), set()
    for number in range(points):
        # Spread over the run, so that few points see all of it.
        first, last = (small.steps[0] * part // points for part in (number, number + 1))
        point = Point(Target(0, chance.randint(max(1, first), last), what))
        assert small.attempt(point, endings=ENDINGS[what]) == []
        seen.add(small.last.error)
    assert small.verified() == []
    # The control: it was felt.
    assert seen - {""}


def test_start_on_full_disk_ends_what_killed_run_left_before_it_says_so(small: Campaign) -> None:
    (last,) = (last for _, kind, _, _, last in small.calm.rows if kind == "run_started")
    killed = small.subject("run", Target(0, last + 300))
    assert killed.status == -9
    ids = traces.run_ids(small.scene.seen)
    filled = small.subject("start", Target(0, 1, "disk"))
    # A row that fits into the last block of a file can still be written.
    assert (filled.status, filled.error) in ((1, "disk_full"), (0, ""))
    assert small.server.settle() == []
    assert traces.cgroups(ids) == []
    assert small.subject("recover", None).status == 0
    assert small.problems(killed, ids) == []


def test_command_says_what_ran_out_with_its_own_code(small: Campaign) -> None:
    ballast = Path(f"{small.server.root}{small.scene.ballast}")
    FAULTS["disk"](str(ballast))
    try:
        full = run(small)
    finally:
        ballast.unlink()
    assert (full[0], full[1]["code"]) == (1, "disk_full"), full
    few = run(small, limits="ulimit -n 12;")
    assert (few[0], few[1]["code"]) == (1, "too_many_open_files"), few
    control = run(small)
    assert (control[0], control[1]["kind"]) == (0, "intent_result"), control


def test_runsc_that_hangs_is_error_within_its_deadline(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one that never answers what it is, then one that never starts the sandbox."""
    path = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))
    real = Config().runsc
    assert world.run(path).error is None
    for asleep, kinds in (
        (True, (errors.HostError, errors.NotEnforceableError)),
        (False, (errors.NotEnforceableError,)),
    ):
        script = tmp_path / f"runsc-{asleep}"
        rest = "exec sleep 1000" if asleep else f'case "$*" in *" run "*) exec sleep 1000;; esac; exec {real} "$@"'
        script.write_text(f"#!/bin/sh\n{rest}\n")
        script.chmod(0o755)
        world.configure(runsc=str(script), start_deadline_seconds=2)
        with monkeypatch.context() as limit:
            if asleep:
                limit.setattr(facts, "_VERSION_SECONDS", 1)
            with pytest.raises(kinds) as told:
                world.run(path)
        assert told.value.code != errors.InternalError.code
    world.configure()
    assert world.run(path).error is None


def test_clock_that_jumps_back_revives_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is an argument of every decision; where the supervisor reads it, it is set here."""
    code = {"main.py": HEAD + "answer = 1" + TAIL}
    short = world.sign(world.package(code), lifetime_ms=3_600_000)
    long = world.sign(world.package(code, name="long", id="long"))
    assert world.run(short).error is None
    with monkeypatch.context() as clock:
        later = time.time() + 86_400
        clock.setattr(time, "time", lambda: later)
        assert world.run(long).error is None
    with pytest.raises(errors.SignatureError, match=r"expired|ended"):
        world.run(short)
    assert world.run(long).error is None
    ended = [row["kind"]["status"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    assert ended == ["ok"] * 3


TTL_SECONDS = 4
GRANTED = '[permissions.credentials]\ngrants = ["db"]\n'
# Its token is of before the jump, and what it has by it of after.
ACROSS = """
import time
def say(word):
    print(word, file=sys.stderr, flush=True)
token = ask(kind="token")["ok"]["token"]
say("asked")
time.sleep(1.5)
say("given" if "value" in ask(kind="credential", name="db", token=token)["ok"] else "refused")
time.sleep(300)
"""


def _said(one: Live, word: str) -> bool:
    return word in control_socket.ask(one.directory, "logs", offset=0)["text"].split()


@pytest.mark.parametrize("days", [2, -2])
def test_clock_that_jumps_while_run_lives_moves_none_of_its_clocks(
    world: World, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """Neither its token's end, nor its ttl, nor what is written of how long it took; and it is no drift."""
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{world.base}/vault.key"\n')
    vault(world, "init")
    vault(world, "put", "probe", "db", secret="a secret")
    before, began, real = len(world.rows()), time.monotonic(), time.time
    lifetime = f"[lifetime]\nttl_seconds = {TTL_SECONDS}\n"
    with live(world, HEAD + ASK + ACROSS, more=GRANTED + lifetime) as one:
        until(lambda: _said(one, "asked"))
        assert not _said(one, "given")
        monkeypatch.setattr(time, "time", lambda: real() + days * 86_400)
        until(lambda: _said(one, "given"))
        assert one.report().holds
        assert "ttl_seconds" in refused(errors.DeadlineError, one.wait().error)
        lasted = time.monotonic() - began
        assert one.drift() == []
        (ended,) = one.rows("run_ended")
    assert TTL_SECONDS <= lasted < 60 * SLOWNESS
    assert TTL_SECONDS * 1000 <= ended["wall_ms"] <= lasted * 1000
    # The control: the clock of the log's timestamps did jump, and the log with these rows verifies.
    monkeypatch.undo()
    (at,) = [row["timestamp_ms"] for row in world.rows()[before:] if row["kind"]["type"] == "run_ended"]
    assert abs(at / 1000 - time.time() - days * 86_400) < 3600
    assert verified(world.state) == []

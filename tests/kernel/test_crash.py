"""kill -9 at fifty points of a run and thirty of a vault: ``make crash`` has every step of much more."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel.fs import secret_files
from tests.crash import scenes, traces, vaults
from tests.crash.campaign import Campaign, Foreign, Point, Tally
from tests.crash.server import Server
from tests.crash.steps import Target
from tests.kernel.internet import Internet
from tests.kernel.live_runs import until

SEED = 20_251_122
# Of the networked one, five more: one for each role.
POINTS = {"plain": 10, "family": 8, "networked": 3, "served": 8, "standby": 8, "secrets": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.mark.parametrize("name", POINTS)
def test_run_killed_anywhere_leaves_nothing_after_next_start(
    name: str, tmp_path: Path, warm: Path, server: Server
) -> None:
    tally, chance = Tally(), random.Random(SEED)
    with scenes.made(tmp_path, name, warm=warm) as (scene,), Foreign(scene) as foreign:
        campaign = Campaign(scene, server, tally)
        campaign.calibrate()
        # How many steps a main loop takes is a matter of time: some points lie behind its end, and others are drawn.
        tried = 0
        while tried < POINTS[name] or (_fired(tally) <= POINTS[name] // 2 and tried < 4 * POINTS[name]):
            campaign.attempt(campaign.random(chance))
            tried += 1
        if name == "plain":
            for point in _around_each_row(campaign):
                campaign.attempt(point)
            with _planted(*PLANTS["a descriptor of a namespace"][0]):
                assert [one[:5] for one in campaign.problems(campaign.last, set())] == ["net:["]
        if scene.internet is not None:
            for point in campaign.roles():
                campaign.attempt(point)
            assert tally.spared() == []
            _beside_a_strangers_device(campaign, scene.internet)
        assert tally.wrong == []
        assert campaign.verified() == []
        assert foreign.touched() == []
    # The control: most of them did kill something.
    assert _fired(tally) > POINTS[name] // 2


def _fired(tally: Tally) -> int:
    """How many of the points did kill something."""
    return sum(count for kind, count in tally.tried.items() if "over before" not in kind)


def test_vault_killed_anywhere_has_what_was_acknowledged_and_goes_on(tmp_path: Path, server: Server) -> None:
    tally, chance = Tally(), random.Random(SEED)
    with vaults.made(tmp_path / "vault", server, tally) as campaign:
        # The first ones are those of the key and of the empty vault.
        for step in (*range(18, 26), *chance.sample(range(26, campaign.steps), 25)):
            campaign.attempt(step)
        assert tally.wrong == []
        assert campaign.verified() == []
    assert tally.tried == {"the vault's writer": 33}


# Each ends with its input. One thing alone holds what is to be found.
_WAITS = "echo; exec cat"
_PRIVATE = ("unshare", "--mount", "--propagation", "private", "sh", "-ec")
_SECRETS = "mount -t tmpfs -o size=4m,nr_inodes=300,mode=0700 none"
PLANTS: dict[str, tuple[tuple[str, ...], str]] = {
    "a process in a namespace": (("unshare", "--net", "sh", "-ec", _WAITS), "net:["),
    "a descriptor of a namespace": (
        ("unshare", "--net", "sh", "-ec", f"exec nsenter -n/proc/$PPID/ns/net sh -c '{_WAITS}' 3</proc/self/ns/net"),
        "net:[",
    ),
    "a mounted namespace": (
        (*_PRIVATE, 'touch "$0"; unshare --net mount --bind /proc/self/ns/net "$0"; ' + _WAITS, "{place}"), "net:["
    ),
    "a mount of credentials": ((*_PRIVATE, f'mkdir "$0"; {_SECRETS} "$0"; {_WAITS}', "{place}"), "of credentials"),
    "a mount where credentials are": (
        (*_PRIVATE, f"mount -t tmpfs none /run; cd /run; mkdir $0; mount -t ramfs none $0; {_WAITS}", "credentials"),
        "of credentials",
    ),
}  # fmt: skip


@contextlib.contextmanager
def _planted(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield


@pytest.mark.parametrize("name", PLANTS)
def test_what_has_no_name_is_looked_for_in_whoever_could_hold_it(name: str, tmp_path: Path) -> None:
    command, kind = PLANTS[name]
    before = traces.held(tmp_path)
    with _planted(*(word.format(place=tmp_path / "place") for word in command)):
        (found,) = traces.held(tmp_path) - before
        assert kind in found
    assert traces.held(tmp_path) == before


def test_detached_file_system_of_credentials_is_found_and_mounted_directory_is_none(tmp_path: Path) -> None:
    before = traces.held(tmp_path)
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    assert traces.held(tmp_path) == before
    os.close(directory)
    with secret_files.SecretFiles(1000):
        (found,) = traces.held(tmp_path) - before
        assert re.fullmatch(r"file system [0-9]+:[0-9]+ detached", found)
    assert traces.held(tmp_path) == before


@pytest.mark.parametrize("ours", [True, False])
def test_whoever_left_its_parents_is_looked_at_where_it_has_something_of_home(tmp_path: Path, ours: bool) -> None:
    """As a keeper whose supervisor was killed; a stranger's namespace is none of ours."""
    before = traces.held(tmp_path)
    with open(tmp_path / "lock", "w") as lock:
        done = subprocess.run(
            ["sh", "-c", "unshare --net sleep 60 >/dev/null 2>&1 & echo $!"],
            pass_fds=(lock.fileno(),) if ours else (),
            stdout=subprocess.PIPE,
            check=True,
        )
    pid = int(done.stdout)
    try:
        space = until(lambda: (found := os.readlink(f"/proc/{pid}/ns/net")) not in before and found)
        assert traces.held(tmp_path) - before == ({space} if ours else set())
    finally:
        os.kill(pid, signal.SIGKILL)
    until(lambda: traces.held(tmp_path) == before)


def _around_each_row(campaign: Campaign) -> Iterator[Point]:
    """Just before the start's row is acknowledged and just after, and the same of the end's."""
    for _, kind, _, _, last in campaign.calm.rows:
        if kind in ("run_started", "run_ended"):
            yield from (Point(Target(0, last)), Point(Target(0, last + 1)), Point(Target(0, last + 3)))


def _beside_a_strangers_device(campaign: Campaign, net: Internet) -> None:
    """It looks like one of ours, and is another supervisor's as far as anybody can tell: it stays, and so does the
    table that its packets may need, until it is gone and a run of ours is the last."""
    (last,) = (last for _, kind, _, _, last in campaign.calm.rows if kind == "run_started")
    net.run("host", "ip", "link", "add", "cv-feedface", "type", "veth", "peer", "name", "stranger0")
    try:
        killed = campaign.subject("run", Target(0, (last + campaign.steps[0]) // 2))
        assert killed.status == -9
        assert campaign.subject("recover", None).status == 0
        links = [one for one in net.leftovers() if ": cv-" in one]
        assert len(links) == 1
        assert ": cv-feedface@" in links[0]
        assert campaign.server.settle() == []
    finally:
        net.run("host", "ip", "link", "delete", "cv-feedface")
    assert campaign.subject("run", None).status == 0
    assert net.leftovers() == []

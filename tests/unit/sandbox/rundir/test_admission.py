"""A run's place among those that are live: of two hundred that want the last places at once, as many get one as there
are, on every ancestor and in every sum; and a place is free again when its holder ends or is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.compile.artefacts import NAMES, Artefacts
from policy.grants.effective import Effective
from policy.grants.resources import Ceilings
from policy.grants.spawning import Spawning
from policy.manifest import lines, parse
from policy.package import Package
from policy.rules.case import Unsigned
from policy.rules.parent import Drawn
from sandbox.host import facts
from sandbox.rundir import admission, directory, registry
from sandbox.rundir.admission import AdmissionRequest, AncestorRun, Lineage, ParentRun

MANIFEST = b"""\
[agent]
id = "child"
name = "Child"
version = "1.0.0"
runtime = "python3"
entry = "main.py"
[resources]
network = "off"
[sandbox]
required = true
backend = "linux-gvisor"
"""
ISSUER = {"display": "operator@local", "pubkey": "p"}
LARGE = Ceilings(memory_mb=100_000, pids_max=100_000, cpu_millis=100_000)


def member(run_id: str, *line: AncestorRun, resources: Ceilings = LARGE) -> ParentRun:
    effective = replace(Effective.bottom(), resources=resources, spawning=line[-1].spawning)
    artefacts = Artefacts(dict.fromkeys(NAMES, b"{}"))
    return ParentRun(run_id, "i", run_id, "d", effective, artefacts, line, ISSUER, frozenset())


def claim(
    parent: ParentRun | None,
    *,
    own: Drawn = Drawn(),  # noqa: B008 - it is frozen
    capacity_mb: int = 1 << 30,
    **wants: int,
) -> AdmissionRequest:
    resources = Ceilings(**{"memory_mb": 1, "pids_max": 1, "cpu_millis": 1, **wants})
    effective = replace(Effective.bottom(), resources=resources)
    lineage = None if parent is None else Lineage(parent, time.monotonic() + 60, own, "reject")
    manifest = parse.parse(MANIFEST, file="agent.toml")
    unsigned = Unsigned(Package({"agent.toml": MANIFEST}, None), allowed=True)
    return AdmissionRequest(manifest, unsigned, effective, "p", capacity_mb, lineage=lineage)


@contextlib.contextmanager
def admitted(runs: Path, run_id: str, asked: AdmissionRequest) -> Iterator[None]:
    """As the runner does it: behind the gate, then visible."""
    label = asked.label(issuer=ISSUER, operator=None, signers=(), now_ms=1)
    with directory.RunDirectory(runs / run_id, label, claim=lambda: asked.settle(runs)):
        yield


def _race(runs: Path, number: int, asked: AdmissionRequest, begin: Any, said: SimpleQueue[str], over: Any) -> None:
    begin.wait()
    try:
        with admitted(runs, f"racer-{number}", asked):
            said.put("admitted")
            over.wait()
    except errors.RuleViolation as e:
        said.put(e.grant)
    except BaseException as e:
        said.put(repr(e))


def race(runs: Path, asked: Mapping[int, AdmissionRequest]) -> list[str]:
    """All at once, each in a process of its own; those that are admitted live until all have been told."""
    fork = multiprocessing.get_context("fork")
    said: SimpleQueue[str] = fork.SimpleQueue()
    begin, over = fork.Event(), fork.Event()
    jobs = [fork.Process(target=_race, args=(runs, n, one, begin, said, over)) for n, one in asked.items()]
    for job in jobs:
        job.start()
    begin.set()
    answers = [said.get() for _ in jobs]
    over.set()
    for job in jobs:
        job.join()
    return answers


def root_run(runs: Path, run_id: str) -> contextlib.AbstractContextManager[object]:
    label = {"agent_id": run_id, "display": "operator@local", "pubkey": "p"}
    return directory.RunDirectory(runs / run_id, label)


def test_who_may_start_costs_no_scan_of_manifest_and_who_may_not_is_told_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[str] = []

    def scan(text: str) -> lines.TomlScan:
        scans.append(text)
        return whole(text)

    whole = lines.scan
    monkeypatch.setattr(lines, "scan", scan)
    with admitted(tmp_path, "first", claim(None)):
        claim(None).check(registry.seen(tmp_path))
        assert scans == []
        label = {**claim(None).label(issuer=ISSUER, operator=None, signers=(), now_ms=1), "payload_digest": "another"}
        with directory.RunDirectory(tmp_path / "second", label), pytest.raises(errors.IdentityViolation) as caught:
            structs.replace(claim(None), package_name="elsewhere").check(registry.seen(tmp_path))
    assert caught.value.where == "agent.toml:2"
    assert len(scans) == 1


def test_of_two_hundred_at_once_as_many_are_admitted_as_there_are_places(tmp_path: Path) -> None:
    """Half of them are children of the root, half of its child: the root's eight places are for all of them."""
    root = member("root", AncestorRun("root", "root", 0, Spawning(3, 8)))
    middle = member("middle", *root.line, AncestorRun("middle", "middle", 1, Spawning(2, 5)))
    with root_run(tmp_path, "root"), admitted(tmp_path, "middle", claim(root)):
        answers = race(tmp_path, {n: claim(root if n % 2 else middle) for n in range(200)})
        # The middle one has a place of the root's as well.
        assert answers.count("admitted") == 7
        assert set(answers) - {"admitted"} == {"spawn.max_descendants"}
        assert [one.run_id for one in registry.live(tmp_path)] == ["root", "middle"]
        assert race(tmp_path, {0: claim(root)}) == ["admitted"]
    assert [path.name for path in tmp_path.iterdir()] == [".gate"]


@pytest.mark.parametrize("name", ["memory_mb", "pids_max", "cpu_millis"])
def test_of_many_at_once_no_more_fit_sum(tmp_path: Path, name: str) -> None:
    """Ten of 30 beside 15 that the parent takes itself, of 100: two fit."""
    limited = member(
        "root", AncestorRun("root", "root", 0, Spawning(1, 100)), resources=structs.replace(LARGE, **{name: 100})
    )
    asked = claim(limited, own=Drawn(**{name: 15}), **{name: 30})
    with root_run(tmp_path, "root"):
        answers = race(tmp_path, dict.fromkeys(range(10), asked))
        assert (answers.count("admitted"), answers.count(f"resources.{name}")) == (2, 8)


def test_place_is_free_when_its_holders_keeper_was_killed(tmp_path: Path) -> None:
    one_place = member("root", AncestorRun("root", "root", 0, Spawning(1, 1)))
    with root_run(tmp_path, "root"):
        ready, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException), admitted(tmp_path, "held", claim(one_place)):
                os.write(write, b"!")
                signal.pause()
            os._exit(1)
        os.close(write)
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        with pytest.raises(errors.SpawnBudgetViolation), admitted(tmp_path, "second", claim(one_place)):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with admitted(tmp_path, "second", claim(one_place)):
            assert (tmp_path / "held").is_dir()


def test_child_of_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    gone = member("root", AncestorRun("root", "root", 0, Spawning(1, 1)))
    with pytest.raises(errors.ParentEndedError), admitted(tmp_path, "late", claim(gone)):
        pass
    with root_run(tmp_path, "root"), admitted(tmp_path, "in time", claim(gone)):
        pass


@pytest.mark.parametrize("name", Drawn.__struct_fields__)
def test_what_outlives_its_parent_is_held_by_who_is_above(tmp_path: Path, name: str) -> None:
    def some(amount: int) -> dict[str, Any]:
        return {name: amount}

    limits = structs.replace(LARGE, **{name: 10})
    root = member("root", AncestorRun("root", "root", 0, Spawning(3, 8)), resources=limits)
    middle = member("middle", *root.line, AncestorRun("middle", "middle", 1, Spawning(2, 5)), resources=limits)
    with root_run(tmp_path, "root"), contextlib.ExitStack() as adopted:
        with admitted(tmp_path, "middle", claim(root, **some(8))):
            adopted.enter_context(admitted(tmp_path, "adopted", claim(middle, **some(7))))
            with admitted(tmp_path, "beside", claim(root, **some(2))):
                pass
        with pytest.raises(errors.SpawnBudgetViolation), admitted(tmp_path, "again", claim(root, **some(4))):
            pass
        with admitted(tmp_path, "fits", claim(root, **some(3))):
            pass


def test_label_says_where_run_stands() -> None:
    root = member("root", AncestorRun("root", "root", 0, Spawning(3, 8)))
    middle = member("middle", *root.line, AncestorRun("middle", "middle", 1, Spawning(2, 5)))
    label = claim(middle).label(issuer=ISSUER, operator="o", signers=(), now_ms=7)
    assert (label["parent"], label["ancestors"], label["depth"]) == ("middle", "root middle", "2")
    assert (label["started_ms"], label["operator"], label["on_parent_exit"]) == ("7", "o", "terminate")


def test_depth_is_counted_from_each_ancestor(tmp_path: Path) -> None:
    root = member("root", AncestorRun("root", "root", 0, Spawning(1, 8)))
    middle = member("middle", *root.line, AncestorRun("middle", "middle", 1, Spawning(5, 5)))
    with root_run(tmp_path, "root"), admitted(tmp_path, "middle", claim(root)):
        with pytest.raises(errors.SpawnBudgetViolation) as refusal, admitted(tmp_path, "leaf", claim(middle)):
            pass
        assert refusal.value.grant == "spawn.max_depth"


def test_of_many_at_once_no_more_are_promised_than_machine_has(tmp_path: Path) -> None:
    """Without a parent; each takes its memory and its sandbox's."""
    asked = claim(None, capacity_mb=1000, memory_mb=236)
    assert asked.label(issuer=ISSUER, operator=None, signers=(), now_ms=1)["host_memory_mb"] == "300"
    answers = race(tmp_path, dict.fromkeys(range(12), asked))
    assert (answers.count("admitted"), answers.count("resources.memory_mb")) == (3, 9)


def test_refusal_says_what_is_missing_and_who_holds_rest(tmp_path: Path) -> None:
    asked = claim(None, capacity_mb=500, memory_mb=236)
    with admitted(tmp_path, "0123456789", asked), pytest.raises(errors.ResourceViolation) as refusal:
        asked.check(registry.live(tmp_path))
    assert refusal.value.message == "memory_mb needs 300 MiB, and 200 of the 500 that this host may promise are left"
    assert refusal.value.hint.startswith("held by `child` 300 MiB (run 01234567): wait")
    assert refusal.value.details["missing_mb"] == 100
    # The same beside it, where the operator promises more than there is.
    with admitted(tmp_path, "0123456789", asked):
        structs.replace(asked, overcommit=1.2).check(registry.live(tmp_path))


def test_machines_capacity_is_no_more_than_what_it_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    assert 0 < facts.capacity_mb() <= total


def test_refusal_tells_caller_of_their_own_runs_and_of_others_sum(tmp_path: Path) -> None:
    """Rules 6 and 8; root is told of all, and an agent that asks for a child of none."""

    def asks(caller: str, capacity_mb: int = 1 << 30) -> AdmissionRequest:
        return structs.replace(claim(None, capacity_mb=capacity_mb), caller=caller, most=9)

    with admitted(tmp_path, "mine-1234", asks("uid7@local")), admitted(tmp_path, "other-567", asks("uid8@local")):
        entries = registry.live(tmp_path)

        def told(caller: str) -> str:
            with pytest.raises(errors.ResourceViolation) as refusal:
                asks(caller, capacity_mb=1).check(entries)
            return refusal.value.hint or ""

        each = entries[0].host_memory_mb
        one, other = f"`child` {each} MiB (run mine-123)", f"`child` {each} MiB (run other-56)"
        assert told("operator@local").startswith(f"held by {one}, {other}: wait")
        assert told("uid7@local").startswith(f"held by {one}, {each} MiB by runs of others: wait")
        assert told("uid9@local").startswith(f"held by {2 * each} MiB by runs of others: wait")

        def shown(caller: str, parent: Lineage | None = None) -> list[bool]:
            return [one.shown for one in admission.owners(entries, admission.shown_to(caller, parent))["child"]]

        assert shown("operator@local") == [True, True]
        assert shown("uid7@local") == [True, False]
        parent = Lineage(member("r", AncestorRun("r", "r", 0, Spawning())), time.monotonic(), Drawn(), "reject")
        assert shown("operator@local", parent) == [False, False]


def test_who_is_bounded_may_have_so_many_runs_and_orphans_among_them(tmp_path: Path) -> None:
    one = structs.replace(claim(None), caller="uid7@local", most=2)
    with admitted(tmp_path, "first", one):
        one.check(registry.live(tmp_path))
        with admitted(tmp_path, "second", one):
            with pytest.raises(errors.BusyError):
                one.check(registry.live(tmp_path))
            for other in ("uid8@local", "operator@local"):
                structs.replace(one, caller=other).check(registry.live(tmp_path))

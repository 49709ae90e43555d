"""Rule 6 for live runs: how much memory this host may still promise, and who holds the rest."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import structs

from policy import errors
from policy.grants.effective import Effective
from policy.grants.paths import FilesystemGrants
from policy.rules import budget
from policy.rules.budget import Promised
from tests import rules_kit as kit

RUNS = [Promised(f"{number:08}-run", f"a{number}", 10 * number) for number in range(1, 7)]


def refusal(wanted: int, capacity: int, promised: list[Promised], share: str = "") -> errors.ResourceViolation:
    with pytest.raises(errors.ResourceViolation) as caught:
        budget.within_host(wanted, capacity, promised, str, share=share)
    return caught.value


def test_promise_is_kept_to_the_last_mib() -> None:
    budget.within_host(40, 250, RUNS, str)
    budget.within_host(0, 0, [], str)
    error = refusal(41, 250, RUNS)
    assert error.details["missing_mb"] == 1
    assert "memory_mb needs 41 MiB, and 40 of the 250 that this host may promise are left" in str(error)
    assert error.where == "resources.memory_mb"
    assert "and 0 of the 100" in str(refusal(1, 100, RUNS))


def test_holders_are_named_the_largest_first() -> None:
    hint = str(refusal(1, 0, RUNS).hint)
    named = hint.removeprefix("held by ").partition(" and ")[0].split(", ")
    assert named[0] == "`a6` 60 MiB (run 00000006)"
    assert named == sorted(named, reverse=True)
    assert hint.partition(" and ")[2].startswith(f"{len(RUNS) - len(named)} more: wait for one of them")
    few = str(refusal(1, 0, RUNS[: len(named)]).hint)
    assert " more" not in few
    assert few.count("MiB (run") == len(named)


def test_runs_of_others_are_summed() -> None:
    hidden = [structs.replace(one, shown=False) for one in RUNS[:2]]
    hint = str(refusal(1, 0, [*hidden, RUNS[2]]).hint)
    assert hint.startswith("held by `a3` 30 MiB (run 00000003), 30 MiB by runs of others: wait")
    assert "`a1`" not in hint
    assert str(refusal(1, 0, hidden).hint).startswith("held by 30 MiB by runs of others: wait")
    assert "by runs of others" not in str(refusal(1, 0, RUNS).hint)
    assert refusal(1, 0, []).hint == "ask for less"
    assert "may promise of its 9 GiB are left" in str(refusal(1, 0, [], share=" of its 9 GiB"))


def test_tasks_are_counted_without_a_limit() -> None:
    """A run without `pids_max` still needs the tasks of the sandbox's own."""
    pids = kit.case().effective.resources.pids_max or 0
    for left, refuses in ((2 * pids + 64, False), (2 * pids + 63, True)):
        refused = kit.refusals(kit.case(host=structs.replace(kit.HOST, pids_free=left))).get(6)
        assert (refused is not None) == refuses


def without(**limits: int | None) -> Effective:
    requested = kit.case().requested
    return dataclasses.replace(requested, resources=structs.replace(requested.resources, **limits))


def test_absent_limit_takes_nothing_of_the_host() -> None:
    mode = FilesystemGrants(mode="ephemeral")
    for name in ("disk_mb", "memory_mb", "pids_max"):
        effective = dataclasses.replace(without(**{name: None}), filesystem=mode)
        none = dataclasses.replace(without(**{name: 0}), filesystem=mode)
        for gvisor in (True, False):
            assert budget.host_memory_mb(effective, gvisor=gvisor) == budget.host_memory_mb(none, gvisor=gvisor)


def test_written_path_needs_no_limit_of_disk() -> None:
    writes = kit.text(('filesystem = "read-only-package"', 'filesystem = "host"'), ('read = ["/srv', 'write = ["/srv'))
    requested = kit.case(writes).requested
    free = dataclasses.replace(requested, resources=structs.replace(requested.resources, disk_mb=None))
    host = structs.replace(kit.HOST, disk_free_mb=0)
    assert 6 not in kit.refusals(kit.case(writes, requested=free, host=host))
    assert 6 in kit.refusals(kit.case(writes, host=host))


@pytest.mark.parametrize(("left", "refuses"), [(64, False), (63, True)])
def test_sandbox_has_64_tasks_without_a_limit(left: int, refuses: bool) -> None:
    host = structs.replace(kit.HOST, pids_free=left)
    assert (6 in kit.refusals(kit.case(host=host, requested=without(pids_max=None)))) == refuses

"""The conclusions of an attestation from played processes, and the reaction of the periodic attestation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.prove.live import Layer, Standing
from sandbox.attest import monitor, processes, reference, verifier
from sandbox.attest.monitor import Attestor
from sandbox.attest.network import Network
from sandbox.attest.network_view import Space
from sandbox.attest.processes import Expected, Family
from sandbox.attest.reference import ReferenceValues, RootFile
from sandbox.attest.verifier import Examination
from sandbox.kernel import procfs
from sandbox.kernel.procfs import Binary, Name, Process
from sandbox.kernel.seccomp import dump
from tests import proof_kit

RUNSC = Binary(1, 2, 3, 4)
HOST = {"cgroup": 1, "ipc": 2, "mnt": 3, "net": 4, "pid": 5, "user": 6, "uts": 7}
CGROUPS = {"memory": "/covenant/run", "pids": "/covenant/run"}
FLAGS = ("--network=none", "--root=/run/root", "--pod-init-config=/run/trace")
EXPECTED = Expected({"--root": "/run/root", "--pod-init-config": "/run/trace"}, CGROUPS, host=HOST)


def process(pid: int, parent: int, *arguments: str, capabilities: int = 0, own: int = 100) -> Process:
    """A process as runsc's are; ``own`` numbers its namespaces."""
    sets = dict.fromkeys(("CapPrm", "CapEff", "CapBnd"), capabilities) | dict.fromkeys(("CapInh", "CapAmb"), 0)
    spaces = {kind: own + number for kind, number in HOST.items()} | {"cgroup": 1}
    if own == 300:
        spaces["pid"] = HOST["pid"]  # the sandbox shares the host's
    return Process(Name(pid, pid), parent, arguments, RUNSC, 0, sets, True, 2, 1, spaces, CGROUPS)


FAMILY = Family(
    structs.replace(process(10, 1, "/usr/bin/runsc"), namespaces=HOST, no_new_privs=False, seccomp=0, filters=0),
    process(11, 10, "runsc-gofer", *FLAGS, "gofer", "--bundle=x", capabilities=0x4001F, own=200),
    process(12, 10, "runsc-sandbox", *FLAGS, "boot", "--bundle=x", capabilities=0x8001F, own=300),
    (process(13, 12, capabilities=0x8001F, own=300),),
)
MEMBERS = {"memory": {10, 11, 12, 13}, "pids": {10, 11, 12, 13}}


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """These processes are not there: they are who they were, and their threads are where they are."""
    by_pid = {one.name.pid: one for one in FAMILY.all()}
    real = procfs.name
    monkeypatch.setattr(procfs, "name", lambda pid: by_pid[pid].name if pid in by_pid else real(pid))
    monkeypatch.setattr(procfs, "thread_cgroups", lambda pid: [by_pid[pid].cgroups])
    monkeypatch.setattr(procfs, "threads", lambda pid: {pid})


def judged(found: Family, expected: Expected = EXPECTED) -> set[str]:
    """The layers that do not hold."""
    return {layer.name for layer in processes.judge(found, expected, MEMBERS)}


def test_family_as_runsc_makes_it_holds() -> None:
    assert judged(FAMILY) == set()


def _sandbox(**changes: Any) -> Callable[[Family], Family]:
    return lambda found: structs.replace(found, sandbox=structs.replace(found.sandbox, **changes))


def _gofer(**changes: Any) -> Callable[[Family], Family]:
    return lambda found: structs.replace(found, gofer=structs.replace(found.gofer, **changes))


def _stub(**changes: Any) -> Callable[[Family], Family]:
    return lambda found: structs.replace(found, others=(structs.replace(found.others[0], **changes),))


SANDBOX, GOFER = FAMILY.sandbox, FAMILY.gofer
MORE = {**SANDBOX.capabilities, "CapEff": 0x8001F | 1 << 21}
CHANGED: dict[str, tuple[Callable[[Family], Family], str]] = {
    "a capability more": (_sandbox(capabilities=MORE), "rights"),
    "a stub with a capability more": (_stub(capabilities=MORE), "rights"),
    "the sandbox's capability for the gofer": (_gofer(capabilities=dict(SANDBOX.capabilities)), "rights"),
    "privileges by execve": (_gofer(no_new_privs=False), "rights"),
    "no filter": (_sandbox(seccomp=0, filters=0), "rights"),
    "a filter in name": (_sandbox(filters=0), "rights"),
    "no filter but its caller's": (
        lambda found: structs.replace(found, runner=structs.replace(found.runner, filters=1)),
        "rights",
    ),
    "the strict mode": (_sandbox(seccomp=1), "rights"),
    "the host's network": (_sandbox(namespaces={**SANDBOX.namespaces, "net": HOST["net"]}), "namespace"),
    "the host's users": (_gofer(namespaces={**GOFER.namespaces, "user": HOST["user"]}), "namespace"),
    "the host's processes for the gofer": (_gofer(namespaces={**GOFER.namespaces, "pid": HOST["pid"]}), "namespace"),
    "a stub elsewhere": (_stub(namespaces={**SANDBOX.namespaces, "mnt": 999}), "namespace"),
    "another binary": (_sandbox(binary=structs.replace(RUNSC, inode=9)), "process"),
    "a stub with a name": (_stub(arguments=("sh",)), "process"),
    "a child of runsc more": (_stub(parent=10), "process"),
    "other flags for the gofer": (_gofer(arguments=("runsc-gofer", "--host-uds=open", "gofer")), "process"),
    "another bundle": (
        lambda found: structs.replace(
            found,
            sandbox=structs.replace(SANDBOX, arguments=("runsc-sandbox", "--network=none", "--root=/other", "boot")),
            gofer=structs.replace(GOFER, arguments=("runsc-gofer", "--network=none", "--root=/other", "gofer")),
        ),
        "process",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_each_thing_that_process_may_not_be_is_told_by_its_layer(name: str) -> None:
    change, layer = CHANGED[name]
    assert judged(change(FAMILY)) == {layer}


def test_filters_read_under_number_anothers_by_now_are_not_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached value holds for every later run: the value of a stranger would be drift for good."""
    readout: Any = SimpleNamespace(mounts={}, image="", runsc_sha256="", flags=())
    path = tmp_path / "filters.json"
    monkeypatch.setattr(dump, "digests", lambda pid: ("somebody's",))
    for reused in (11, 12):
        by_pid = {one.name.pid: one.name for one in FAMILY.all()}
        by_pid[reused] = Name(reused, 99)
        monkeypatch.setattr(procfs, "name", by_pid.get)
        known = verifier.VerifierCache()
        with pytest.raises(ProcessLookupError):
            list(verifier.judge_filters(FAMILY, known, readout, 0, path))
        assert Name(reused, reused) not in known.filters
        assert not path.exists()


def test_filters_are_remembered_of_who_has_loaded_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a supervisor's filter one that has none yet looks like one that has: it would be drift for ever after."""
    found = structs.replace(FAMILY, runner=structs.replace(FAMILY.runner, filters=1))
    loaded = {11: ("beneath", "gofer's"), 12: ("beneath",)}
    monkeypatch.setattr(dump, "digests", loaded.__getitem__)
    readout: Any = SimpleNamespace(mounts={}, image="", runsc_sha256="", flags=())
    path = tmp_path / "filters.json"

    def told() -> list[str]:
        return [layer.name for layer in verifier.judge_filters(found, verifier.VerifierCache(), readout, 0, path)]

    assert told() == []
    assert not path.exists()
    loaded[12] = ("beneath", "sandbox's")
    assert told() == []
    assert path.exists()
    assert told() == []
    loaded[12] = ("beneath",)
    assert told() == ["filter"]


def test_look_before_sandbox_has_loaded_its_own_is_not_its_filters_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was never compared, and once another run was remembered it was drift until its end."""
    found, known = structs.replace(FAMILY, runner=structs.replace(FAMILY.runner, filters=1)), verifier.VerifierCache()
    loaded = {11: ("beneath", "gofer's"), 12: ("beneath",)}
    monkeypatch.setattr(dump, "digests", loaded.__getitem__)
    readout: Any = SimpleNamespace(mounts={}, image="", runsc_sha256="", flags=())
    path = tmp_path / "filters.json"

    def told(known: verifier.VerifierCache) -> list[str]:
        return [layer.name for layer in verifier.judge_filters(found, known, readout, 0, path)]

    assert told(known) == []
    loaded[12] = ("beneath", "sandbox's")
    assert told(verifier.VerifierCache()) == [], "another run, which is remembered"
    assert told(known) == [], "the first, looked at again"
    loaded[12] = ("beneath", "another's")
    assert told(verifier.VerifierCache()) == ["filter"], "the control"


def test_filters_of_whom_another_traces_by_now_are_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer can put them out of force, and they are as they were."""
    asked: list[int] = []

    def digests(pid: int) -> tuple[str, ...]:
        asked.append(pid)
        return ("own",)

    monkeypatch.setattr(dump, "digests", digests)
    readout: Any = SimpleNamespace(mounts={}, image="", runsc_sha256="", flags=())
    traced, known = (
        structs.replace(FAMILY, sandbox=structs.replace(FAMILY.sandbox, tracer=77)),
        verifier.VerifierCache(),
    )
    for found in (FAMILY, FAMILY, traced):
        assert list(verifier.judge_filters(found, known, readout, 0, tmp_path / "filters.json")) == []
    assert asked == [11, 12, 12]


def test_filters_that_could_not_be_read_are_asked_for_at_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that was frozen at that moment is attested again later."""
    loaded: dict[int, tuple[str, ...] | None] = {11: ("gofer's",), 12: ("sandbox's",)}
    monkeypatch.setattr(dump, "digests", lambda pid: loaded[pid])
    readout: Any = SimpleNamespace(mounts={}, image="", runsc_sha256="", flags=())
    path, known = tmp_path / "filters.json", verifier.VerifierCache()

    def told(known: verifier.VerifierCache) -> list[str]:
        return [layer.name for layer in verifier.judge_filters(FAMILY, known, readout, 0, path)]

    assert told(verifier.VerifierCache()) == []
    loaded[12] = None
    assert told(known) == []
    loaded[12] = ("another's",)
    assert told(known) == ["filter"]
    # What was read is not read again: a process cannot take a filter off.
    loaded[12] = ("sandbox's",)
    assert told(known) == ["filter"]


def test_sandbox_in_another_network_namespace_than_runs_is_told() -> None:
    inside = structs.replace(EXPECTED, network=SANDBOX.namespaces["net"])
    assert judged(FAMILY, inside) == set(), "control"
    assert judged(FAMILY, structs.replace(EXPECTED, network=77)) == {"namespace"}


def test_thread_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [CGROUPS, {**CGROUPS, "memory": "/"}]
    monkeypatch.setattr(procfs, "thread_cgroups", lambda pid: apart if pid == 12 else [CGROUPS])
    assert judged(FAMILY) == {"cgroup"}


LISTED = {"memory": {10, 11, 12, 13, 120, 121}, "pids": {10, 11, 12, 13, 120, 121}}


def test_who_is_in_lists_of_every_cgroup_need_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(procfs, "threads", lambda pid: {12, 120, 121} if pid == 12 else {pid})
    monkeypatch.setattr(procfs, "thread_cgroups", asked.append)
    assert judged(FAMILY, structs.replace(EXPECTED, threads=LISTED)) == set()
    assert asked == []


@pytest.mark.parametrize("of", CGROUPS)
@pytest.mark.parametrize("missing", [12, 121], ids=["its first", "one of the others"])
def test_thread_that_one_list_has_not_is_asked_where_it_is(
    monkeypatch: pytest.MonkeyPatch, of: str, missing: int
) -> None:
    """It left, or was born after the list: only the kernel's word for that thread tells the two apart."""
    lists = {**LISTED, of: LISTED[of] - {missing}}
    there = [CGROUPS, CGROUPS]
    monkeypatch.setattr(procfs, "threads", lambda pid: {12, 120, 121} if pid == 12 else {pid})
    monkeypatch.setattr(procfs, "thread_cgroups", lambda pid: [*there, CGROUPS] if pid == 12 else [CGROUPS])
    assert judged(FAMILY, structs.replace(EXPECTED, threads=lists)) == set(), "born since, and where it should be"
    there[1] = {**CGROUPS, of: "/aside"}
    assert judged(FAMILY, structs.replace(EXPECTED, threads=lists)) == {"cgroup"}


def test_lists_of_another_cgroup_under_that_name_are_told_by_first_thread() -> None:
    """Another directory lies over the one that was made: everybody is in its list, and elsewhere by their own word."""
    moved = structs.replace(FAMILY, sandbox=structs.replace(SANDBOX, cgroups={**CGROUPS, "memory": "/aside"}))
    assert judged(moved, structs.replace(EXPECTED, threads=LISTED)) == {"cgroup"}


def test_without_list_every_thread_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [CGROUPS, {**CGROUPS, "pids": "/"}]
    monkeypatch.setattr(procfs, "thread_cgroups", lambda pid: apart if pid == 12 else [CGROUPS])
    assert judged(FAMILY, structs.replace(EXPECTED, threads={"memory": LISTED["memory"]})) == {"cgroup"}


def test_on_version_2_process_is_where_it_is() -> None:
    def moved(found: Family, path: str) -> Family:
        one, *rest = (structs.replace(p, cgroups={"": path}) for p in found.all())
        return Family(one, rest[0], rest[1], tuple(rest[2:]))

    expected = structs.replace(EXPECTED, cgroups={"": "/covenant/run"})
    assert judged(moved(FAMILY, "/covenant/run"), expected) == set()
    assert judged(moved(FAMILY, "/"), expected) == {"cgroup"}


def test_flags_of_this_run_are_no_flags_of_its_policy() -> None:
    assert processes.flags(FAMILY, EXPECTED) == ("--network=none",)


def test_each_descriptor_that_was_passed_is_flag_by_its_number_inside() -> None:
    """Another number outside is another run; a second descriptor is one that no policy has."""

    def passing(*flags: str) -> tuple[str, ...]:
        arguments = ("runsc-sandbox", *FLAGS, "boot", "--bundle=x", *flags, "--stdio-fds=8,9,10", "id")
        found = structs.replace(FAMILY, sandbox=structs.replace(FAMILY.sandbox, arguments=arguments))
        return processes.flags(found, EXPECTED)

    assert passing("--pass-fd=11:3") == passing("--pass-fd=7:3") == ("--network=none", "--pass-fd=3")
    assert passing("--pass-fd=11:3", "--pass-fd=12:3") == ("--network=none", "--pass-fd=3", "--pass-fd=3")
    assert passing("--pass-fd=11:4") == ("--network=none", "--pass-fd=4")


# --- what was made, written down --------------------------------------------------------------------------


def made(**changes: Any) -> ReferenceValues:
    """A record of a run."""
    space = Space(5, 6, 2, ("device 1 lo", "route"))
    network = Network(Name(1, 2), 3, space, structs.replace(space, fd=7), "eth0", "/usr/sbin/nft")
    plain = ReferenceValues(
        "run", "agent", "0" * 64, 2_000_000, Name(10, 10), "/run", 1, {"memory": "/m"}, CGROUPS, {"pids.max": "9"},
        {"/": (1, 2)}, "/packages/p", network, streams=("pipe:[1]", "pipe:[2]", "pipe:[3]"),
    )  # fmt: skip
    return structs.replace(plain, **changes)


@pytest.mark.parametrize("network", [True, False])
def test_record_is_read_as_it_was_written(tmp_path: Path, network: bool) -> None:
    one = made(root_file=RootFile(1, 2, 3, "0" * 64, "1 2\n")) if network else made(network=None)
    one.write(tmp_path)
    assert ReferenceValues.read(tmp_path) == one


@pytest.mark.parametrize("version", [4, 6])
def test_record_not_there_or_of_another_version_is_none(tmp_path: Path, version: int) -> None:
    assert ReferenceValues.read(tmp_path) is None
    (tmp_path / reference.RECORD).write_text(json.dumps({"version": version}))
    (tmp_path / reference.RECORD).chmod(0o600)
    assert ReferenceValues.read(tmp_path) is None


# --- the periodic look ------------------------------------------------------------------------------------

HOLDS = Examination("run", (Layer("cgroup", Standing.EQUAL), Layer("mounts", Standing.NARROWER)))
DRIFT = Layer("cgroup", Standing.WIDER, "less", "more")


class Looks:
    """An attestor whose looks are scripted, and what it told."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *reports: Examination,
        alarm: bool = False,
        runs: bool = True,
        over: bool = False,
    ) -> None:
        self.told: list[Layer] = []
        script = iter(reports)
        monkeypatch.setattr(monitor, "examine", lambda *_, **__: next(script))
        monkeypatch.setattr(procfs, "name", lambda pid: made().runner if runs else None)
        monkeypatch.setattr(monitor, "FIRST_AGAIN_SECONDS", 0)
        self.attestor = Attestor(
            made(), proof_kit.CASES["much"]().artefacts, state=Path("/nowhere"), seconds=30, alarm=alarm,
            drifted=self.told.append, over=lambda: over,
        )  # fmt: skip
        self.round = self.attestor.round()

    def look(self) -> errors.RunError | None:
        """One look of the round."""
        return self.round.look()


GONE = Examination("run", (), gone=True)


def test_whoever_is_not_found_at_start_is_looked_for_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, *[GONE] * 5, Examination("run", (DRIFT,)))
    looks.attestor.started()
    assert isinstance(looks.look(), errors.DriftError)
    assert looks.told == [DRIFT]


def test_nobody_is_given_intent_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "FIRST_SECONDS", 0)
    looks = Looks(monkeypatch, GONE)
    looks.attestor.started()
    error = looks.look()
    assert isinstance(error, errors.DriftError)
    assert error.details["layer"] == "process"


@pytest.mark.parametrize("how", ["whatever ran it has ended", "it is being ended"])
def test_one_not_found_as_it_ends_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    looks = Looks(monkeypatch, GONE, runs=how == "it is being ended", over=how == "it is being ended")
    looks.attestor.started()
    assert looks.look() is None
    assert looks.told == []


def test_nothing_is_looked_at_before_agent_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert looks.look() is None
    assert looks.round.at_start


def test_what_holds_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, HOLDS)
    looks.attestor.started()
    assert looks.look() is None
    assert looks.told == []


def test_drift_is_told_and_ends_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, Examination("run", (DRIFT,)))
    looks.attestor.started()
    error = looks.look()
    assert isinstance(error, errors.DriftError)
    assert error.details["layer"] == "cgroup"
    assert looks.told == [DRIFT]


def test_alarm_is_told_once_for_as_long_as_it_lasts_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Examination("run", (DRIFT,))
    looks = Looks(monkeypatch, bad, bad, HOLDS, bad, alarm=True)
    looks.attestor.started()
    assert [looks.look() for _ in range(4)] == [None] * 4
    assert looks.told == [DRIFT, DRIFT]


def test_alarms_of_one_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    floods = [Examination("run", (structs.replace(DRIFT, found=str(number)),)) for number in range(500)]
    looks = Looks(monkeypatch, *floods, alarm=True)
    looks.attestor.started()
    for _ in floods:
        looks.look()
    assert len(looks.told) == 100


def test_sandbox_leaving_is_looked_for_again_and_then_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, HOLDS, *[GONE] * 19, HOLDS, *[GONE] * 20)
    looks.attestor.started()
    assert looks.round.wait is not None
    assert looks.look() is None
    for _ in range(19):
        assert looks.look() is None
        assert looks.round.wait() == 0.5
    assert looks.look() is None
    assert looks.round.wait() == 30, "it was there after all"
    ends = [looks.look() for _ in range(20)]
    assert ends[:19] == [None] * 19
    assert isinstance(ends[19], errors.DriftError)

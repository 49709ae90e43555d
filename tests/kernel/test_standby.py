"""Instances that wait for their intent: used once, never reused, replaced, and gone with anything that they rest on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox import config as configuration
from sandbox import doctor
from sandbox.host import facts
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup.cgroup import Leaf
from sandbox.layers.store import LayerStore
from sandbox.lifecycle.types import Request
from sandbox.run_result import RunResult
from sandbox.rundir import label, registry
from sandbox.rundir.registry import Entry
from sandbox.serve import standby_worker
from sandbox.serve.api import client
from sandbox.standby import dispatch, wanted
from sandbox.storage import package_reader as packages
from sandbox.storage.trust_state import State
from tests import cli_kit
from tests.kernel import internet, serving
from tests.kernel.conftest import leftovers
from tests.kernel.revoking import manifest_of, next_root, revoke
from tests.kernel.serving import Served, covenant, open_place
from tests.kernel.world import HEAD, ROOT, SLOWNESS, TAIL, World

PATIENCE = 60 * SLOWNESS
# Answers with its intent, and with the traces of an earlier intent that it finds.
ECHO = (
    HEAD
    + """
mark = '/tmp/was-here'
answer = {'text': intent['text'], 'used': os.path.exists(mark), 'run': os.environ['COVENANT_RUN_ID']}
open(mark, 'w').close()
if intent['text'] == 'fork' and not os.fork():
    os.closerange(0, 3)
    import time
    time.sleep(60)
    os._exit(0)
if intent['text'] == 'stay':
    import time
    time.sleep(60)
"""
    + TAIL
)


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    """One supervisor for all; each test has agent ids of its own."""
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as one:
            yield one
        assert leftovers(world) == []


def _package(
    world: World,
    name: str,
    code: str = ECHO,
    *,
    standby: int = 1,
    memory_mb: int = 64,
    entry: str = "main.py",
    lifetime_ms: int = 86_400_000,
    **fields: Any,
) -> Path:
    about: dict[str, Any] = {"name": name, "id": name, "memory_mb": memory_mb, "entry": entry}
    package = world.package({entry: code}, **about, **fields)
    manifest = package / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[sandbox]\n", f"[sandbox]\nstandby = {standby}\n"))
    return world.sign(package, lifetime_ms=lifetime_ms)


def _ready(served: Served, agent_id: str) -> list[Entry]:
    """The instances of an agent that can be given an intent."""
    found = registry.live(served.world.state / "runs")
    here = (one for one in found if one.agent_id == agent_id and label.STANDBY in one.label)
    return [one for one in here if list(one.path.glob("standby-*"))]


def _until(true: Callable[[], bool], served: Served) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, (served.log(), serving.why_not_ready(served))
        time.sleep(0.02)


def _await(served: Served, agent_id: str, count: int = 1) -> list[Entry]:
    _until(lambda: len(_ready(served, agent_id)) >= count, served)
    return _ready(served, agent_id)


def _warmed(served: Served, name: str, code: str = ECHO, **package: Any) -> tuple[Path, list[Entry]]:
    """A package of which instances are ready, after its one cold run."""
    path = _package(served.world, name, code, **package)
    first = served.run(path, "first")
    assert first.error is None, first
    return path, _await(served, name, package.get("standby", 1))


def _said(answer: RunResult) -> dict[str, object]:
    assert answer.error is None, answer
    assert answer.result is not None
    said: dict[str, object] = json.loads(answer.result.text)
    return said


def _leaf(entry: Entry) -> Leaf:
    leaf = Leaf(cgroup.Hierarchies.read(), entry.run_id)
    leaf.adopt(entry.cgroups)
    return leaf


def _states(world: World, run_id: str) -> list[str]:
    return [
        row["kind"]["state"] for row in world.rows() if row["kind"].get("run_id") == run_id and "state" in row["kind"]
    ]


def _codes(world: World, run_id: str) -> list[str | None]:
    """Return the error code in the row of its end."""
    rows = (row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended")
    return [row["code"] for row in rows if row["run_id"] == run_id]


def test_instance_answers_once_and_next_is_another(served: Served) -> None:
    path, _ = _warmed(served, "once")
    seen: set[str] = set()
    run_id = ""
    for text in ("one", "two", "fork", "three"):
        (instance,) = _await(served, "once")
        answer = served.run(path, text)
        said = _said(answer)
        # The same process that waited, and no earlier intent in it: not even one that a child outlived.
        assert (said["text"], said["used"], said["run"]) == (text, False, instance.run_id)
        run_id = answer.run_id
        assert run_id == instance.run_id
        assert run_id not in seen
        seen.add(instance.run_id)
        assert not instance.path.exists()
    rows = [row for row in served.world.rows() if row["kind"].get("run_id") == run_id]
    rows = [row for row in rows if not row["kind"]["type"].startswith("self_test")]  # made where none is remembered
    # The start is in the log before the agent is told anything, and long after it was made.
    assert [row["kind"].get("state", row["kind"]["type"]) for row in rows] == [
        "Provisioned", "Validated", "Isolated", "capability_check", "run_started", "Running",
        "intent_dispatched", "Terminated", "Archived", "run_ended",
    ]  # fmt: skip
    assert {row["issuer"]["display"] for row in rows[:3]} == {"standby@local"}
    assert {row["issuer"]["display"] for row in rows[3:]} == {"operator@local"}


def test_waiting_instance_is_known_to_denials(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are in the log while it waits, though its start is not."""
    _, (instance,) = _warmed(served, "waiting")
    monkeypatch.setenv("COVENANT_HOME", str(served.world.base))
    monkeypatch.setenv("COVENANT_STATE", str(served.world.state))
    said = cli_kit.document("denials", instance.run_id[:8])
    assert (said["run_id"], said["agent_id"], said["used"]) == (instance.run_id, "waiting", False)


def test_waiting_instance_is_listed_by_attest_until_used(served: Served) -> None:
    path, (instance,) = _warmed(served, "attested", cpu_ms=120_000 * SLOWNESS)
    listed = {"run_id": instance.run_id, "agent_id": "attested"}
    document = json.loads(covenant("attest", "--all", "--json", served=served).stdout)
    assert listed in document["waiting"]
    assert instance.run_id not in [one["run_id"] for one in document["runs"]]
    shown = covenant("attest", "--all", served=served).stdout
    assert f"{instance.run_id} attested: standby instance, waits for its intent\n" in shown
    named = covenant("attest", instance.run_id, served=served)
    assert "is a standby instance, and no run yet" in named.stderr
    # The fix: with an intent it is a run, which is attested.
    using = threading.Thread(target=served.run, args=(path, "stay"))
    using.start()
    try:
        _until(lambda: "Running" in _states(served.world, instance.run_id), served)
        document = json.loads(covenant("attest", "--all", "--json", served=served).stdout)
        assert listed not in document["waiting"]
        assert {one["run_id"]: one["holds"] for one in document["runs"]}[instance.run_id]
    finally:
        covenant("kill", instance.run_id, served=served)
        using.join(PATIENCE)


def test_what_is_frozen_takes_no_processor_and_what_another_thaws_is_not_used(served: Served) -> None:
    path, (instance,) = _warmed(served, "frozen")
    leaf = _leaf(instance)
    assert leaf.frozen()

    def used_us(seconds: float) -> int:
        before = leaf.cpu_time_us()
        time.sleep(seconds)
        return leaf.cpu_time_us() - before

    assert used_us(0.5) == 0
    leaf.thaw()
    _until(lambda: used_us(0.5) > 0, served)  # the control: an idle sandbox that is not frozen
    assert _said(served.run(path, "after"))["run"] != instance.run_id
    _until(lambda: not instance.path.exists(), served)


def test_of_two_that_come_at_once_each_has_its_own(served: Served) -> None:
    path, _ = _warmed(served, "race")
    answers: list[RunResult] = []
    threads = [threading.Thread(target=lambda: answers.append(served.run(path, "now"))) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(PATIENCE)
    said = [_said(one) for one in answers]
    assert len({one["run"] for one in said}) == 3
    assert not any(one["used"] for one in said)


def test_new_package_of_same_agent_takes_place_of_old(served: Served) -> None:
    path, (old,) = _warmed(served, "changed")
    new = _package(served.world, "changed", ECHO + "\n# another\n")
    assert new == path
    assert _said(served.run(new, "new"))["run"] != old.run_id
    _until(lambda: not old.path.exists(), served)
    (fresh,) = _await(served, "changed")
    assert fresh.payload_digest != old.payload_digest
    assert _said(served.run(new, "again"))["run"] == fresh.run_id


def test_granted_path_that_was_replaced_is_read_anew(served: Served) -> None:
    granted = Path(f"/srv/covenant-standby-{os.getpid()}")
    granted.mkdir(mode=0o755)
    try:
        (granted / "word").write_text("old")
        reads = f"[permissions.filesystem]\nread = [{str(granted)!r}]"
        code = HEAD + f"answer = open({str(granted / 'word')!r}).read()" + TAIL
        path, (instance,) = _warmed(served, "granted", code=code, more=reads)
        granted.rename(granted.with_suffix(".old"))
        granted.mkdir(mode=0o755)
        (granted / "word").write_text("new")
        answer = served.run(path)
        assert answer.run_id != instance.run_id
        assert answer.result is not None
        assert json.loads(answer.result.text) == "new"
    finally:
        for place in (granted, granted.with_suffix(".old")):
            if place.exists():
                (place / "word").unlink(missing_ok=True)
                place.rmdir()


def test_instance_of_changed_root_file_is_not_used(served: Served, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("of the layer")
    state = served.world.state
    ref = LayerStore(state).pack_tree(tmp_path, "note", prefix="/srv/notes").ref
    code = HEAD + "answer = open('/srv/notes/note').read()" + TAIL
    path, (instance,) = _warmed(served, "layered", code=code, more=f'[root]\nlayers = ["{ref}"]')
    used = served.run(path)
    assert (used.run_id, json.loads(used.result.text if used.result else "")) == (instance.run_id, "of the layer")
    (_,) = _await(served, "layered")
    (file,) = [p for p in (state / "rootfs/images").glob("*/image.erofs") if b"of the layer" in p.read_bytes()]
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"of the layer", b"of another !"))
    with pytest.raises(errors.LayerChangedError):
        served.run(path)
    file.write_bytes(raw)
    again = served.run(path)
    assert again.result is not None
    assert json.loads(again.result.text) == "of the layer"


def test_what_is_revoked_is_not_kept_and_new_root_ends_what_rests_on_old(served: Served) -> None:
    """A revocation acts at once; any other root is seen at the next request, or by the clock."""
    world = served.world
    kept, (stays,) = _warmed(served, "kept")
    gone, (goes,) = _warmed(served, "revoked")
    digest = goes.payload_digest
    assert [one.run_id for one in revoke(world, next_root(world, manifest_of(world, digest))).ended] == [goes.run_id]
    _until(lambda: not goes.path.exists(), served)
    with pytest.raises(errors.SignatureError):
        served.run(gone)
    assert _said(served.run(kept, "x"))["run"] != stays.run_id
    _until(lambda: not stays.path.exists(), served)
    (fresh,) = _await(served, "kept")
    assert _said(served.run(kept, "y"))["run"] == fresh.run_id
    # A refused package is not started again and again: its author or its signer must act first.
    rejected = [row for row in world.rows() if row["kind"].get("agent_id") == "revoked"]
    time.sleep(1)
    assert [row for row in world.rows() if row["kind"].get("agent_id") == "revoked"] == rejected
    assert not _ready(served, "revoked")


def test_root_that_comes_while_it_is_asked_is_seen_before_start_is_written(served: Served) -> None:
    world = served.world
    path, (instance,) = _warmed(served, "meanwhile")
    request = Request(packages.read(path), "x", world.issuer)
    root = next_root(world, manifest_of(world, "0" * 64))
    (connection,) = dispatch._ready(world.state / "runs", dispatch.socket_name(request.package))
    with connection, State(world.state) as state:
        dispatch.send(connection, dispatch.order(request, configuration.load(served.world.state).digest))
        assert dispatch.receive(connection)["offer"] == instance.run_id
        state.replace_root(root, int(time.time() * 1000))
        dispatch.send(connection, {"go": instance.run_id})
        assert "cold" in dispatch.receive(connection)
    _until(lambda: not instance.path.exists(), served)
    kinds = [row["kind"]["type"] for row in world.rows() if row["kind"].get("run_id") == instance.run_id]
    assert "run_started" not in kinds
    # The control: with the same root all along the next one is used.
    (fresh,) = _await(served, "meanwhile")
    assert _said(served.run(path, "y"))["run"] == fresh.run_id


def test_root_s_file_that_was_written_again_is_read_anew(served: Served) -> None:
    path, (instance,) = _warmed(served, "rewritten")
    place = max((served.world.state / "trust").glob("root-*.json"))
    os.utime(place)
    assert _said(served.run(path, "x"))["run"] != instance.run_id
    _until(lambda: not instance.path.exists(), served)


def test_one_that_was_made_before_supervisor_read_its_configuration_is_not_used_after(served: Served) -> None:
    """It was made after the file was written, so that to itself nothing has changed since."""
    world = served.world
    config = world.state / "config.toml"
    plain = config.read_text()

    def read_again() -> None:
        _until(lambda: bool(served.waiting()), served)
        before = set(served.waiting())
        os.kill(served.pid, signal.SIGHUP)
        # The warm sandboxes of the earlier root end once the new root holds.
        _until(lambda: before.isdisjoint(served.waiting()), served)

    try:
        config.write_text(plain + "grace_seconds = 7\n")
        path, (used,) = _warmed(served, "settled")
        assert _said(served.run(path, "x"))["run"] == used.run_id  # the control: both go by the one before
        (old,) = _await(served, "settled")
        read_again()
        assert _said(served.run(path, "y"))["run"] != old.run_id
        # It gets no request, and ends.
        _until(lambda: not old.path.exists(), served)
        (fresh,) = _await(served, "settled")
        assert _said(served.run(path, "z"))["run"] == fresh.run_id
    finally:
        config.write_text(plain)
        read_again()


def test_loosened_limit_is_seen_before_agent_is_told(served: Served) -> None:
    path, (instance,) = _warmed(served, "limits")
    leaf = _leaf(instance)
    (leaf.paths["pids"] / "pids.max").write_text("max")
    assert _said(served.run(path, "x"))["run"] != instance.run_id
    _until(lambda: not instance.path.exists(), served)


@pytest.mark.parametrize("what", ["agent", "keeper"])
def test_one_that_was_killed_while_it_waited_is_replaced_and_nobody_waits_for_it(served: Served, what: str) -> None:
    path, (instance,) = _warmed(served, f"killed-{what}")
    if what == "agent":
        _leaf(instance).kill()
    else:
        os.kill(instance.keeper, signal.SIGKILL)
    # At once: a request that comes meanwhile is answered by another one.
    assert _said(served.run(path, "x"))["run"] != instance.run_id
    _until(lambda: not instance.path.exists(), served)
    (fresh,) = _await(served, f"killed-{what}")
    assert _said(served.run(path, "y"))["run"] == fresh.run_id
    assert "run_started" not in [
        r["kind"]["type"] for r in served.world.rows() if r["kind"].get("run_id") == instance.run_id
    ]


def test_instances_of_package_have_one_holder_whose_death_is_theirs_alone(served: Served) -> None:
    other, (elsewhere,) = _warmed(served, "not-held")
    path, ready = _warmed(served, "held", standby=3)
    (pid,) = {one.keeper for one in ready}
    assert Path(f"/proc/{pid}/comm").read_text().strip() == standby_worker.NAME
    assert elsewhere.keeper != pid
    failed: list[errors.CovenantError] = []

    def stay() -> None:
        try:
            served.run(path, "stay")
        except errors.CovenantError as e:
            failed.append(e)

    asking = threading.Thread(target=stay)
    asking.start()
    # At work, and not only on its way: a row can be seen before it is acknowledged, and one that never is goes again.
    _until(lambda: any(not _leaf(one).frozen() for one in ready), served)
    os.kill(pid, signal.SIGKILL)
    asking.join(PATIENCE)
    assert isinstance(failed[0], errors.KeeperError)
    _until(lambda: not any(one.path.exists() for one in ready), served)
    (working,) = [one.run_id for one in ready if "Running" in _states(served.world, one.run_id)]
    _until(lambda: _codes(served.world, working) == [errors.CutOffError.code], served)
    assert _await(served, "held", 3)[0].keeper != pid
    assert _said(served.run(other, "x"))["run"] == elsewhere.run_id


def test_holder_told_to_end_ends_all_it_has_in_order(served: Served) -> None:
    path, ready = _warmed(served, "told", standby=2)
    os.kill(ready[0].keeper, signal.SIGTERM)
    _until(lambda: not any(one.path.exists() for one in ready), served)
    for one in ready:
        _until(lambda one=one: _states(served.world, one.run_id)[-2:] == ["Terminated", "Archived"], served)  # type: ignore[misc]
    # None of them was anybody's failure, and others are made.
    assert _said(served.run(path, "x"))["text"] == "x"
    _await(served, "told", 2)


def test_whoever_goes_away_ends_instance_that_worked_for_it(served: Served) -> None:
    path, (instance,) = _warmed(served, "left", cpu_ms=120_000 * SLOWNESS)
    with served.connected() as sock:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        asking = threading.Thread(target=_asked, args=(sock, directory))
        asking.start()
        _until(lambda: "Running" in _states(served.world, instance.run_id), served)
        # Another is made while this one works, however long that takes.
        (other,) = _await(served, "left")
        assert other.run_id != instance.run_id
        assert instance.path.exists()
        sock.shutdown(2)
        asking.join(PATIENCE)
        os.close(directory)
    _until(lambda: not instance.path.exists(), served)
    # Its last row comes after its directory is gone.
    _until(lambda: _codes(served.world, instance.run_id) == [errors.KilledError.code], served)


def _asked(sock: object, directory: int) -> None:
    with pytest.raises(errors.CovenantError):
        client.run(sock, directory, "stay")  # type: ignore[arg-type]


def test_who_speaks_without_intent_is_refused_also_when_it_was_made_ahead(served: Served) -> None:
    impatient = """
import os, threading, time
begin = time.monotonic()
late = threading.Timer(5, lambda: os.write(1, b'x'))
late.start()
"""
    code = impatient + HEAD + "if time.monotonic() - begin < 5: late.cancel()\nanswer = 1\n" + TAIL
    path, (instance,) = _warmed(served, "early", code=code)
    time.sleep(5)
    answer = served.run(path, "hi")
    assert answer.run_id == instance.run_id
    # Its word is on the pipe before the intent is, or beside the answer: no way round comes to a result.
    assert isinstance(answer.error, errors.EarlyOutputError | errors.MalformedOutputError), answer


def test_one_that_never_waits_for_its_intent_is_tried_ever_more_seldom(served: Served) -> None:
    """A cold agent has its intent long before it writes, so that no test sees that it never reads it."""
    code = 'import time\ntime.sleep(2)\nprint(\'{"text": "x"}\')\n'
    path = _package(served.world, "restless", code)
    try:
        assert served.run(path, "first").error is None
        says = "`restless` asks for standby and did not wait for its intent, the next try is in {} s"
        _until(lambda: says.format(4) in served.log(), served)
        assert [wait for wait in (1, 2, 4) if says.format(wait) in served.log()] == [1, 2, 4]
        # A requester is told why none is ready, as long as the pause lasts.
        _until(lambda: "standby: `restless` did not wait for its intent: next try in" in _top(served), served)
        config = configuration.load(served.world.state)
        _until(lambda: "`restless` did not wait" in doctor.standby(config, 0.0).found, served)
        assert served.run(path, "cold").error is None
        states = [row["kind"] for row in served.world.rows() if row["kind"].get("state") == "Terminated"]
        assert any(kind["reason"].startswith("early_output") for kind in states)
    finally:
        wanted.drop(served.world.state, "restless")


def _top(served: Served) -> str:
    return covenant("top", "--once", served=served).stdout


def test_who_asks_and_gives_up_before_it_says_go_costs_no_instance_and_runs_nothing(served: Served) -> None:
    path, (instance,) = _warmed(served, "gave-up")
    left = str(uuid.uuid4())
    request = Request(packages.read(path), "x", served.world.issuer, intent_id=left)
    runs = served.world.state / "runs"
    for says in (None, {"go": "another"}, {"nonsense": 1}):
        (connection,) = dispatch._ready(runs, dispatch.socket_name(request.package))
        with connection:
            dispatch.send(connection, dispatch.order(request, configuration.load(served.world.state).digest))
            assert dispatch.receive(connection)["offer"] == instance.run_id
            if says is not None:
                dispatch.send(connection, says)
    assert _states(served.world, instance.run_id)[-1] == "Isolated"
    answer = served.run(path, "y")
    assert _said(answer) == {"text": "y", "used": False, "run": instance.run_id}
    assert answer.intent_id != left


def test_intent_that_no_agent_can_be_told_costs_no_instance(served: Served) -> None:
    path, (instance,) = _warmed(served, "huge")
    with pytest.raises(errors.UsageError):
        served.run(path, "x" * (1 << 20))
    assert [one.run_id for one in _ready(served, "huge")] == [instance.run_id]


def test_instances_are_counted_among_live_and_hold_no_agent_id(served: Served) -> None:
    path, ready = _warmed(served, "counted", standby=2)
    assert len(ready) == 2
    assert all(one.host_memory_mb > 64 for one in ready)
    # The same package at another place is another owner of the id (rule 8), and idle instances of it are none.
    other = served.world.base / "packages" / "elsewhere"
    path.rename(other)
    assert _said(served.run(other, "moved"))["text"] == "moved"


def test_one_whose_envelope_has_expired_is_gone_and_no_other_is_made(served: Served) -> None:
    path, (instance,) = _warmed(served, "expires", lifetime_ms=20_000 * SLOWNESS)
    assert instance.path.exists()
    _until(lambda: not instance.path.exists(), served)
    reasons = [
        row["kind"]["reason"]
        for row in served.world.rows()
        if row["kind"].get("run_id") == instance.run_id and row["kind"].get("state") == "Terminated"
    ]
    assert reasons == [f"{errors.KilledError.code}: standby: its envelope has expired"]
    _until(lambda: "expires" not in [one.agent_id for one in wanted.wanted(served.world.state)], served)
    with pytest.raises(errors.ExpiredError):
        served.run(path)


def test_agent_of_node_waits_as_well_and_is_used_once(served: Served) -> None:
    code = """
const lines = require("readline").createInterface({input: process.stdin});
lines.once("line", (line) => {
  console.log(JSON.stringify({text: JSON.stringify({text: JSON.parse(line).text, run: process.env.COVENANT_RUN_ID})}));
  lines.close();
});
"""
    path, (instance,) = _warmed(served, "node", code, runtime="node", entry="main.js", memory_mb=256)
    for text in ("one", "two"):
        (instance,) = _await(served, "node")
        assert _leaf(instance).frozen()
        assert _said(served.run(path, text)) == {"text": text, "run": instance.run_id}
        assert not instance.path.exists()


def test_who_only_waits_gives_way_to_run_that_needs_memory(warm: Path) -> None:
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world, overcommit=0.05) as one:
            _, (instance,) = _warmed(one, "waits")
            _, (large,) = _warmed(one, "large", memory_mb=256)
            # All that may be promised but for a little and for the smaller of those that wait, with what each sandbox
            # costs beside its agent.
            most = int(facts.capacity_mb() * 0.05) - (instance.host_memory_mb - 64) - instance.host_memory_mb - 10
            needs = world.sign(world.package({"main.py": ECHO}, name="needs", id="needs", memory_mb=most))
            assert _said(one.run(needs, "x"))["text"] == "x"
            # As few as make up for what was missing, the largest first.
            assert not large.path.exists()
            assert instance.path.exists()
            rows = [row["kind"] for row in world.rows() if row["kind"].get("agent_id") == "needs"]
            assert [row["type"] for row in rows if row["type"] in ("manifest_rejected", "run_started")] == [
                "manifest_rejected",
                "run_started",
            ]
        assert leftovers(world) == []


# Before the supervisor's first line: record each fork of it and of its children, with the forking process.
_FORKS_TOLD = """
import os, sys
def told(event, arguments):
    if event in ("os.fork", "os.forkpty", "os.posix_spawn"):
        name, code = open("/proc/self/comm").read().strip(), sys._getframe(1).f_code
        where = f"{os.path.basename(code.co_filename)}:{code.co_name}"
        with open(PLACE, "a") as file:
            file.write(f"{name} {len(os.listdir('/proc/self/task'))} {where}\\n")
sys.addaudithook(told)
"""
# What is no Python, or executes at once (ADR 0037, ADR 0051).
_AMONG_THREADS = {"launcher.py:start", "spawn.py:_fork"}


def test_instances_with_network_each_have_their_own_in_one_holder(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is forked among its threads that goes on as Python, which Python itself warns of from 3.12 on."""
    forks = tmp_path / "forks"
    monkeypatch.setattr(serving, "_MAIN", _FORKS_TOLD.replace("PLACE", repr(str(forks))) + serving._MAIN)
    with internet.made() as net:
        world = internet.configured(internet.NetworkedWorld(tmp_path, warm=warm), net)
        code = HEAD + internet.probes(["tcp('api.example.com', 80, 10)", "tcp('9.9.9.9', 80)"]) + TAIL
        grants = internet.entries(("api.example.com", "[80]", "tcp"))
        package = _package(world, "reaches", code, standby=2, network="full", more=grants)
        host = f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}"
        settings = {"uplink": "eth0", "resolvers": [internet.RESOLVER], "attest_seconds": 1}
        with Served(world, before=["nsenter", host], **settings) as one:
            first = one.run(package)
            ready = _await(one, "reaches", 2)
            assert len({entry.keeper for entry in ready}) == 1
            answers = [first, *(one.run(package) for _ in ready)]
            for answer in answers:
                assert answer.result is not None, (answer.error, one.log())
                assert json.loads(answer.result.text) == ["connected", "ECONNREFUSED"]
            assert answers[1].run_id in {entry.run_id for entry in ready}
            assert not [row for row in world.rows() if row["kind"]["type"] == "drift"]
            one.stop()
            assert net.leftovers() == []
        assert leftovers(world) == []
    told = [(name, int(threads), who) for name, threads, who in map(str.split, forks.read_text().splitlines())]
    # The control: of each instance its sandbox and its gates, and the forks that do go on as Python.
    among = [one for one in told if one[0] == standby_worker.NAME and one[1] > 1]
    assert len(among) >= 2 * 2
    assert {one[2] for one in told if one[1] == 1} >= {"process.py:fork"}
    assert {one[2] for one in told if one[1] > 1} <= _AMONG_THREADS


def test_supervisor_s_death_takes_those_along_that_nobody_used(warm: Path) -> None:
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as one:
            _, (instance,) = _warmed(one, "orphan")
            one.kill()
            _until(lambda: not instance.path.exists(), one)
            assert leftovers(world) == []
            # And the next one makes its own again, from the record.
            one.start()
            _await(one, "orphan")
        assert leftovers(world) == []


def test_page_can_be_followed(served: Served) -> None:
    fences = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "standby.md").read_text(), re.MULTILINE | re.DOTALL)
    (line,) = "".join(fences).splitlines()
    program, *words = shlex.split(line)
    assert program == "covenant"
    hello = _package(served.world, "hello", HEAD + "answer = intent['text']" + TAIL)
    done = covenant(*[str(hello) if word == "hello" else word for word in words], "--json", served=served)
    assert done.returncode == 0, (done.stdout, done.stderr)
    document = json.loads(done.stdout)
    # What is missing here is said, and not left out in silence; no figure is judged.
    assert {*document["figures"], *document["missing"]} == {"line", "standby", "cold", "raw", "bwrap"}
    assert all(figure["median_ms"] > 0 for figure in document["figures"].values())


def test_what_cannot_be_compared_is_refused(served: Served) -> None:
    cold = served.world.sign(served.world.package({"main.py": ECHO}, name="cold", id="cold"))
    done = covenant("bench", "dispatch", str(cold), "--json", served=served)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (2, "usage")


def test_cold_run_says_that_nobody_keeps_instances(world: World) -> None:
    answer = world.run(_package(world, "alone"))
    assert answer.error is None
    assert any(line.startswith("standby:") for line in answer.not_enforced)


def test_client_orders_nothing_costs_no_instance(served: Served) -> None:
    path, (instance,) = _warmed(served, "reached")
    runs = served.world.state / "runs"
    with dispatch.connect(instance.path, dispatch.socket_name(packages.read(path))) as silent:
        with dispatch.connect(instance.path, dispatch.socket_name(packages.read(path))) as other:
            dispatch.send(other, {"op": "run", "package": "another", "envelope": ""})
            assert dispatch.receive(other) == {"cold": "another package"}
        assert instance in registry.live(runs)
        assert "run_started" not in [
            row["kind"]["type"] for row in served.world.rows() if row["kind"].get("run_id") == instance.run_id
        ]
        assert silent.recv(1) == b""
        done = covenant("run", str(path), "x", "--json", served=served, uid=serving.CALLER)
        assert json.loads(done.stdout)["run_id"] == instance.run_id, done

"""The rules that are checked again when a parent asks for a child: one child that breaks each, and its control.

One key signs everything here, so that a rule alone refuses a child. A child cannot break the depth of rule 5: an agent
without a level below it has no broker (test_spawn.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from covenant.keys import signing
from policy import decide
from policy.compile import cgroup
from sandbox.host import facts
from sandbox.storage import package_reader
from tests.kernel.conftest import leftovers
from tests.kernel.families import BIG, SMALL, answered, member, reads, spawn
from tests.kernel.serving import opened
from tests.kernel.world import DEFAULTS, HEAD, TAIL, World

PROGRAM = '[permissions.executables]\nallow = ["/usr/bin/cat"]\n'
MIDDLE: dict[str, Any] = {"memory_mb": 1024, "resources": "pids_max = 256\ncpu_millis = 1000\n"}
UNLIMITED = "[lifetime]\nunlimited = true\n"


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[World]:
    """One world for all; what a case leaves in it is replaced by the next."""
    made = World(tmp_path_factory.mktemp("ruled"), warm=warm)
    yield made
    assert leftovers(made) == []


@dataclass(frozen=True)
class Case:
    """A child that breaks a rule by ``faulty``, and is spawned with ``good`` in its place. Where it asks to be
    ``narrowed``, what it is refused for is nothing that a parent can take from it."""

    faulty: dict[str, Any]
    good: dict[str, Any] = field(default_factory=dict)
    narrowed: bool = False


CASES = {
    "rule_3_role": Case({"role": "reader", "more": PROGRAM}, {"role": "reader"}),
    "rule_4_parent": Case({"memory_mb": 2049}),
    "rule_5_spawn_budget": Case({"resources": BIG["resources"]}),
    "rule_6_resources": Case({"memory_mb": 1024}),
    "rule_7_deny_list": Case(
        {"more": '[permissions.syscalls]\nallow = ["ptrace"]\n'},
        {"more": '[permissions.syscalls]\nallow = ["getpid"]\n'},
        narrowed=True,
    ),
    "rule_8_identity": Case({"id": "asks"}),
    "rule_9_lifetime": Case(
        {"more": UNLIMITED, "unlimited": "unapproved"}, {"more": UNLIMITED, "unlimited": "approved"}, narrowed=True
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_each_rule_is_asked_of_child(ruled: World, code: str) -> None:
    case = CASES[code]
    faulty = case.faulty.get("id", "faulty")
    how = f"on_excess={'narrow' if case.narrowed else 'reject'!r}"
    asks = f"answer = [child({faulty!r}, {how}), child('good', {how})]"
    ruled.configure(overcommit=_room_beside_the_parent(512) if code == "rule_6_resources" else 1.0)
    # It lies elsewhere than its children, so that a child may have its id and be a package by itself.
    path = member(ruled, "asks", asks, more=PROGRAM + spawn(), **BIG)
    path = path.rename(ruled.base / f"asks-{code}")
    for name, fields in (("faulty", case.faulty), ("good", case.good)):
        _child(ruled, name, **fields)
    with opened(ruled.base / "packages") as children:
        refused, spawned = answered(ruled, path, children=children)
    assert refused["error"]["code"] == code, refused
    assert spawned["ok"]["text"] == "1", spawned
    rejected = [row["kind"] for row in ruled.rows() if row["kind"]["type"] == "manifest_rejected"]
    assert (rejected[-1]["agent_id"], rejected[-1]["rule"]) == (faulty, int(code.split("_")[1]))
    denied = [row["kind"] for row in ruled.rows() if row["kind"]["type"] == "denied"]
    assert (denied[-1]["layer"], denied[-1]["target"], denied[-1]["code"]) == ("spawn", faulty, code)


def test_what_parent_was_left_bounds_its_child_and_not_what_its_manifest_says(ruled: World) -> None:
    ruled.configure()
    _child(ruled, "half", memory_mb=600)
    path = member(ruled, "less", "answer = child('half')", more=spawn(1), **MIDDLE)
    top = member(ruled, "leaves", "answer = child('less', only={'memory_mb': 512})", more=spawn(), **BIG)
    said = json.loads(answered(ruled, top)["ok"]["text"])
    assert said["error"]["code"] == "rule_4_parent", said
    # The control: the same agent with all that its manifest says.
    assert answered(ruled, path)["ok"]["text"] == "1"


def test_place_must_be_left_with_whoever_is_above_parent(ruled: World) -> None:
    """The asking agent has room for a child, and the run above it has none.

    Two live descendants are its limit.
    """
    ruled.configure()
    _child(ruled, "second")
    member(ruled, "first", "import time\ntime.sleep(600)", **SMALL)
    holds = "ask('spawn', agent='first', text='')\nanswer = child('second')"
    path = member(ruled, "holds", holds, more=spawn(1, 2), **MIDDLE)
    top = member(ruled, "above", "answer = child('holds')", more=spawn(2, 2), **BIG)
    said = json.loads(answered(ruled, top)["ok"]["text"])
    assert said["error"]["code"] == "rule_5_spawn_budget", said
    assert "`above` has 2 live descendants" in said["error"]["message"]
    # The control: the same agent without a parent.
    assert answered(ruled, path)["ok"]["text"] == "1"


def test_how_long_row_is_is_not_for_parent_to_say(ruled: World) -> None:
    """The parent's limits for a child are quoted in a refusal, up to a bound.

    The child's text is whole in the log, at a limited rate. Half of a surrogate pair is no valid path.
    """
    ruled.configure()
    _child(ruled, "reads", more=reads("/usr/share/doc"))
    code = """
    def only(path): return child("reads", on_excess="narrow", only={"read": ["/usr/share/doc" + path]})
    long = "\u00e9" * 260_000
    answer = [only("/" + long[:3000]), only("/\\ud800"), only("/" + "a" * 4000), only("")]
    def sent(text):
        # The line is too long for one write.
        line = memoryview(json.dumps({"id": 0, "kind": "spawn", "agent": "nobody", "text": text},
                                     ensure_ascii=False).encode() + b"\\n")
        while line: line = line[os.write(3, line):]
        return hear(0)
    answer += [sent(text) for text in (long, long, long, "short")]
    """
    top = member(ruled, "long", code, more=reads("/usr/share/doc") + spawn(2, 4), **BIG)
    before = len(ruled.rows())
    said = answered(ruled, top)
    codes = [one.get("error", {}).get("code") for one in said]
    assert codes[:4] == ["malformed_request", "malformed_request", "path_refused", None], said
    assert codes[4:] == ["package_invalid", "package_invalid", "too_many_requests", "package_invalid"]
    rows = ruled.rows()[before:]
    rejected = [row["kind"] for row in rows if row["kind"]["type"] == "manifest_rejected"]
    assert [kind["code"] for kind in rejected] == ["path_refused", *["package_invalid"] * 3]
    assert max(len(json.dumps(row)) for row in rows) < 16 * 1024
    refused = [row["kind"] for row in rows if row["kind"]["type"] == "denied"]
    assert ("nobody", "too_many_requests") in [(kind["target"], kind["code"]) for kind in refused]


def _child(world: World, name: str, *, role: str = "", unlimited: str = "", **fields: Any) -> None:
    """A small agent of this name."""
    fields = {**SMALL, "id": name, "cpu_ms": 250_000, **fields}
    path = world.package({"main.py": HEAD + "answer = 1" + TAIL}, name=name, **fields)
    if role:
        manifest = path / "agent.toml"
        manifest.write_text(manifest.read_text().replace("[agent]\n", f'[agent]\nrole = "{role}"\n'))
    if unlimited == "unapproved":
        _sign_unapproved(world, path)
    else:
        world.sign(path, approve_unlimited=unlimited == "approved")


def _sign_unapproved(world: World, path: Path) -> None:
    """As the command refuses to sign: a lifetime without end, and no word that it is meant."""
    now_ms, read = int(time.time() * 1000), package_reader.read(path)
    terms = signing.Terms(serial=now_ms, approve_unlimited=True)
    statement = signing.statement(read, decide.manifest_of(read), terms, now_ms=now_ms)
    said = statement.model_copy(update={"approve_unlimited": False})
    signing.write_envelope(path, signing.sign(said, world.key))


def _room_beside_the_parent(megabytes: int) -> float:
    """How much of this machine's memory its runs may be promised, so that beside the parent so much is left."""
    held = BIG["memory_mb"] + DEFAULTS["disk_mb"] + cgroup.overhead_mb(512)
    return float(held + megabytes) / facts.capacity_mb()

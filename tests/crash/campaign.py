"""Kill a run at one point after another; the next start clears up, and the campaign searches for remains.

(1) The run is killed at a point. Either the process of the run is killed at its own step or at one of a process that it
    forked. Or a process below it is killed (the runsc process, the sandbox, the gofer, the agent, a gate). Or the run
    is killed from outside at any time.
(2) Where only a process below was killed, the run must end by itself, with an error that says so.
(3) The next start, which is now and then killed as well; then one that is not killed.
(4) Nothing is left. Objects that are not ours are untouched. Each started run has exactly one end. Each acknowledged
    row is in the log. The log holds together.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy.audit_log import chain, verify
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup.delegation import BASE
from tests.crash import traces
from tests.crash.scenes import Scene
from tests.crash.server import Outcome, Server, Subject
from tests.crash.steps import FAULTS, ROLES, Target

# Errors with which a run may end when a process below it was killed; never `internal`, and never none at all.
_ENDINGS = frozenset({
    "", "agent_failed", "drift", "gate_died", "kernel", "sandbox_crashed", "supervisor_silent",
    # What was killed was a self-test's: it says no, as it does for every way in which it does not pass.
    "not_enforceable", "self_test_failed",
})  # fmt: skip

# The client that sends an intent is told that the instance's shim was killed.
_OF_AN_INSTANCE = frozenset({"keeper_silent"})

# Errors that the client may get instead of an answer. `stopped`: the supervisor ended, and its runs with it.
_TOLD = _ENDINGS - {""} | _OF_AN_INSTANCE | {"stopped"}

# A shim that only brings an intent to an instance takes fewer steps than this; one that makes an instance many more.
_SHORT = 500
# Steps of an instance from its last row until the client has its answer, and a margin.
_ANSWERING = 60

# Seen once in some 2,000 points, with thirty processes per core, and not in forty more tries: only the run's clock
# noticed the killed process.
_LATE = frozenset({"deadline"})


@dataclass(frozen=True)
class Point:
    """Where a run is killed, and where the start after it, if that is."""

    target: Target | None
    kill_after: float | None = None
    again: int | None = None

    def __str__(self) -> str:
        place = f"after {self.kill_after:.3f} s" if self.target is None else str(self.target)
        return f"{place}, again={self.again}"


@dataclass
class Tally:
    """Counts of what was tried, and the faults that were found."""

    tried: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, name: str) -> None:
        """Add one to the count of `name`."""
        self.tried[name] = self.tried.get(name, 0) + 1

    def spared(self) -> list[str]:
        """Return the roles (``ROLES``) of which no process was killed."""
        return [role for role in ROLES if not self.tried.get(f"the {role}")]


class Campaign:
    """The points of one scene. ``calibrate`` first: it lets a run pass unharmed and learns how many steps it takes."""

    def __init__(self, scene: Scene, server: Server, tally: Tally) -> None:
        self.scene, self.server, self.tally = scene, server, tally
        self._seen_bytes = 0
        self._open: dict[str, str] = {}
        self._written: set[str] = set()
        self._started: set[str] = set()

    def calibrate(self) -> None:
        """Learn the steps and the time of a run and of a start.

        Raises:
            AssertionError: a run that is not killed fails or leaves something.
        """
        self._calm()  # makes what every later run finds: copies, keys, folders
        calm = self._calm()
        start = self.subject("recover", None)
        assert start.status == 0, start.detail
        self.steps, self.seconds, self.calm = calm.counts, calm.seconds, calm
        self.start_steps = start.counts[0]
        self.before, self.held = traces.tree(self.scene.seen), traces.held(self.scene.place)
        assert self.problems(calm, set()) == []

    def _calm(self) -> Outcome:
        calm = self._run(None)
        assert calm.status == 0, (calm.error, calm.detail)
        assert self.server.settle() == []
        return calm

    def rows(self) -> Iterator[Point]:
        """Yield every step within the writing of each audit row, and the step after it.

        For a waiting instance, yield every step from its intent on, and every step of the shim that brings the intent.
        """
        # Rows that were written together have the same steps.
        for slot, first, last in dict.fromkeys(row[2:] for row in self.calm.rows):
            for step in range(first, last + 2):
                yield Point(Target(slot, step))
        if self.scene.work == "standby":
            # All instances belong to one process, which counts the steps of all. Take those of the first that is given
            # an intent, up to its end and the answer.
            holder, begin = next((slot, last) for _, kind, slot, _, last in self.calm.rows if kind == "run_started")
            end = next(last for _, kind, slot, _, last in self.calm.rows if kind == "run_ended" and slot == holder)
            most = min(end + _ANSWERING, self.steps[holder])
            yield from (Point(Target(holder, step)) for step in range(begin + 2, most + 1))
            askers = [slot for slot in range(1, len(self.steps)) if slot != holder and self.steps[slot] < _SHORT]
            yield from (Point(Target(slot, step)) for slot in askers[:2] for step in range(1, self.steps[slot] + 1))

    def roles(self) -> Iterator[Point]:
        """Each of what a run with a network has below it, killed as soon as it is there and the start is written."""
        began = next(last for _, kind, slot, _, last in self.calm.rows if kind == "run_started" and slot == 0)
        yield from (Point(Target(0, began, role)) for role in ROLES)

    def random(self, chance: random.Random) -> Point:
        """A point anywhere."""
        again = chance.randint(1, self.start_steps + 40) if chance.random() < 0.25 else None
        kind = chance.random()
        main = chance.randint(1, self.steps[0])
        if kind < 0.5:
            return Point(Target(0, main), again=again)
        if kind < 0.65 and len(self.steps) > 1:
            slot = chance.randrange(1, len(self.steps))
            return Point(Target(slot, chance.randint(1, max(1, self.steps[slot]))), again=again)
        if kind < 0.75:
            return Point(None, kill_after=chance.uniform(0, self.seconds), again=again)
        roles = [r for r in ROLES if r != "gate" or self.scene.internet is not None]
        return Point(Target(0, main, chance.choice(roles)))

    def attempt(self, point: Point, *, endings: Collection[str] | None = None) -> list[str]:
        """Run the point, and return the faults found after it, each with the point before it.

        ``endings`` are the errors with which a run that was not killed itself may end.
        """
        ids = traces.run_ids(self.scene.seen)
        self._started.clear()
        outcome = self._run(point)
        self.last = outcome
        self.tally.count(_kind(point, outcome))
        ids |= traces.run_ids(self.scene.seen)
        wrong = []
        if outcome.status is None:
            wrong.append("it hung")
        by_itself = outcome.status is not None and outcome.status >= 0
        if by_itself:
            # Only a process below the run was killed, or none: the run clears up by itself.
            allowed = _ENDINGS | (_LATE if point.target and point.target.victim in ROLES else set())
            allowed |= _OF_AN_INSTANCE if self.scene.work == "standby" else set()
            if outcome.error not in (allowed if endings is None else endings):
                wrong.append(f"it ended with `{outcome.error}`: {outcome.detail}")
            if not self._leaves(point):
                wrong += [f"before the next start: {one}" for one in self.problems(outcome, ids)]
        if point.again is not None:
            self.subject("recover", Target(0, point.again))
        start = self.subject("recover", None)
        if start.status != 0:
            wrong.append(f"the next start ended with {start.status} {start.error}: {start.detail}")
        wrong += self.problems(outcome, ids)
        if self.scene.work == "standby":
            wrong += self._once(outcome)
        wrong = [f"{self.scene.name}: {point}: {one}" for one in wrong]
        self.tally.wrong += wrong
        return wrong

    def _leaves(self, point: Point) -> bool:
        """Whether the next start finds remains although the first process ended by itself.

        That is so after an exhausted resource. It is so for a child whose shim was killed with no process above both.
        It is also so for a shim of a supervisor that was then told to end.
        """
        target = point.target
        if target is None:
            return False
        inner = self.scene.name in ("family", "standby") and target.slot > 0 and target.victim == "self"
        return target.victim in FAULTS or inner

    # --- the parts --------------------------------------------------------------------------------------

    def _run(self, point: Point | None) -> Outcome:
        self.scene.before()
        return self.subject(
            self.scene.work, None if point is None else point.target, point.kill_after if point else None
        )

    def subject(self, work: str, target: Target | None, kill_after: float | None = None) -> Outcome:
        """Run one subject and return its outcome."""
        return self.server.subject(
            Subject(
                work=work,
                state=str(self.scene.place / "supervisor"),
                home=str(self.scene.place),
                issuer=dict(self.scene.world.issuer),
                ballast=self.scene.ballast,
                package=str(self.scene.package),
                network=self.scene.network,
                user=self.scene.user,
                target=None if target is None else (target.slot, target.step, target.victim),
                kill_after=kill_after,
            )
        )

    def problems(self, outcome: Outcome, ids: set[str]) -> list[str]:
        """Return what is left, touched or lost; ``ids`` are the runs that existed."""
        wrong = [f"it still runs: {one}" for one in self.server.settle()]
        wrong += traces.left(self.scene.seen, self.before, ids, named=self.scene.place)
        held = traces.held(self.scene.place) - self.held
        self.held |= held
        wrong += sorted(held)
        if self.scene.internet is not None:
            wrong += [one for one in self.scene.internet.leftovers() if one not in self.scene.foreign]
        if self.scene.secrets:
            wrong += [f"a secret in the clear: {one}" for one in traces.holding(self.scene.seen, self.scene.secrets)]
        return wrong + self._log(outcome)

    def _log(self, outcome: Outcome) -> list[str]:
        """Starts and ends, what was acknowledged, and the chain."""
        path = self.scene.seen / "supervisor" / "audit"
        raw = (path / "events.jsonl").read_bytes()
        wrong = []
        for line in raw[self._seen_bytes :].splitlines():
            row = json.loads(line)
            kind, run_id = row["kind"], row["kind"].get("run_id")
            self._written.add(row["id"])
            if kind["type"] == "run_started":
                if run_id in self._open:
                    wrong.append(f"run {run_id} started twice")
                self._open[run_id] = "started"
                self._started.add(run_id)
            if kind["type"] == "run_ended":
                if self._open.get(run_id) != "started":
                    wrong.append(f"run {run_id} ended, and was {self._open.get(run_id)}")
                self._open[run_id] = "ended"
        self._seen_bytes = len(raw)
        wrong += [f"run {name} has no end" for name, state in self._open.items() if state == "started"]
        self._open = {}
        wrong += [f"row {kind} was acknowledged and is not there" for name, kind, *_ in outcome.rows
                  if name not in self._written]  # fmt: skip
        return wrong

    def _once(self, outcome: Outcome) -> list[str]:
        """Each intent was run once and answered, or refused with an error that says something; never run twice."""
        asked = [one["asked"] for one in outcome.done if "run" not in one]
        answered = [one for one in outcome.done if "run" in one]
        wrong = [f"`{one['asked']}` was answered with {one}" for one in answered
                 if one["said"] != one["asked"] or one["run"] not in self._started]  # fmt: skip
        if len({one["run"] for one in answered}) != len(answered):
            wrong.append(f"one run answered twice: {answered}")
        if len(self._started) > len(asked):
            wrong.append(f"{len(asked)} intents were asked, and {len(self._started)} runs began")
        if len(answered) < len(asked) and outcome.error not in _TOLD:
            wrong.append(f"an intent was answered with `{outcome.error}`: {outcome.detail}")
        return wrong

    def verified(self) -> list[str]:
        """Return the complaints of ``covenant audit verify`` about the whole log."""
        return [f"{self.scene.name}: {one}" for one in verified(self.scene.seen / "supervisor")]


def verified(state: Path) -> list[str]:
    """Return the complaints of ``covenant audit verify`` about a state's whole log; empty when it holds."""
    raw = [(state / "audit" / name).read_bytes() for name in ("events.jsonl", "events.chain.jsonl")]
    head = (state / "audit-head" / "head.json").read_bytes()
    key = chain.read_public_key((state / "audit-head" / "ledger.pub").read_bytes())
    report = verify.verify(raw[0], raw[1], head, key)
    return [] if report.valid else [f"the log does not verify: {report}"]


def _kind(point: Point, outcome: Outcome) -> str:
    if point.target is None:
        return "the run, from outside"
    if not outcome.fired:
        return "nothing: it was over before"
    if point.target.victim != "self":
        return f"the {point.target.victim}"
    return "the run" if point.target.slot == 0 else "a process that it forked"


class Foreign:
    """Foreign objects beside the runs: a cgroup with another name and one named like a run's, each with a process.

    ``touched`` lists the changes to them. test_recovery_foreign.py tests all other foreign objects.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._paths: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Foreign:
        mounts = cgroup.Hierarchies.read().mounts
        for place in (
            Path(mounts["memory"]) / f"covenant-other-{uuid.uuid4()}",
            Path(mounts["memory"]) / BASE / str(uuid.uuid4()),
        ):
            place.mkdir(parents=True)
            self._paths.append(place)
            process = subprocess.Popen(["sleep", "infinity"])
            self._processes.append(process)
            (place / "cgroup.procs").write_text(str(process.pid))
        return self

    def touched(self) -> list[str]:
        """Return the foreign objects that were changed."""
        wrong = [f"foreign cgroup {path} is gone" for path in self._paths if not path.exists()]
        return wrong + [f"foreign process {p.pid} was ended" for p in self._processes if p.poll() is not None]

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for path in self._paths:
            if path.exists():
                path.rmdir()


def summary(tally: Tally, seconds: float) -> str:
    """One paragraph."""
    total = sum(tally.tried.values())
    kinds: Sequence[Any] = sorted(tally.tried.items())
    each = ", ".join(f"{count} {name}" for name, count in kinds)
    return f"{total} points in {seconds:.0f} s on {os.cpu_count()} cores: {each}; {len(tally.wrong)} wrong"

"""Connect a run with its children: the broker of its agent, and what the children's shims know of the parent."""

from __future__ import annotations

import contextlib
import functools
import select
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct

from policy import data, decide, denials, errors
from policy.clocks import Deadline
from policy.grants.effective import Effective
from policy.lifecycle import State
from policy.manifest.agent import Manifest
from policy.rules import nine
from policy.rules.parent import Drawn, delegate
from policy.signing import trust
from sandbox.broker import children
from sandbox.broker.children import ChildManager, ChildRequest, Say
from sandbox.broker.server import Broker
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.runsc import command
from sandbox.network import gateway
from sandbox.run_io import Outcome
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import registry
from sandbox.rundir.admission import AncestorRun, Lineage, ParentRun
from sandbox.shim import control_socket

_MIB = 1024 * 1024
# How long a visible run may take until it listens, and how often it is asked meanwhile (seconds).
PATIENCE_SECONDS, _AGAIN_SECONDS = 15.0, 0.02
# Starts a child, in the child's own shim.
Start = Callable[[ChildRequest, Say], None]


class ChildContext(Struct, frozen=True):
    """The parent of a child run, as the child's shim sees it. ``stack`` owns the descriptors of the run."""

    child_request: ChildRequest
    say: Say
    stack: contextlib.ExitStack

    @property
    def run_id(self) -> str:
        """Return the id that its parent's shim gave it."""
        return self.child_request.run_id

    @property
    def lineage(self) -> Lineage:
        """Return its ancestors."""
        return self.child_request.lineage

    def admitted(self, label: Mapping[str, str]) -> None:
        """Check, behind the gate, that the parent of this child is live.

        Raises:
            errors.ParentEndedError: the parent is gone.
        """
        if children.gone(self.child_request.alive):
            raise errors.ParentEndedError("the run that asked for it has ended")
        self.say({"admitted": {"on_parent_exit": label["on_parent_exit"]}})

    def watches(self, label: Mapping[str, str], adopted: Callable[[], None]) -> gateway.Watches:
        """Return the watch of the parent's end. ``adopted`` is called when the child goes on without its parent."""
        epoll = self.stack.enter_context(contextlib.closing(select.epoll()))
        # A pipe at its end of file stays readable: report it once.
        epoll.register(self.child_request.alive, select.EPOLLIN | select.EPOLLONESHOT)
        look = children.on_parent_exit(label["on_parent_exit"], adopted)

        def ended() -> Outcome:
            return look() if epoll.poll(0) else None

        return {epoll.fileno(): ended}


class Delegator(Struct, frozen=True):
    """Describe one run as an ancestor of its children."""

    run_id: str
    intent_id: str
    issuer: dict[str, str]
    lineage: Lineage | None

    def member(self, decision: decide.Decision) -> ParentRun:
        """Return the run with its grants."""
        trusted, manifest = decision.trusted, decision.manifest
        assert isinstance(trusted, trust.TrustedPackage)
        line = () if self.lineage is None else self.lineage.parent.line
        own = AncestorRun(self.run_id, manifest.agent.id, len(line), decision.effective.spawning)
        return ParentRun(
            run_id=self.run_id,
            intent_id=self.intent_id,
            agent_id=manifest.agent.id,
            payload_digest=trusted.payload_digest,
            effective=decision.effective,
            artefacts=decision.artefacts,
            line=(*line, own),
            issuer=self.issuer,
            capabilities=frozenset(manifest.capabilities.required),
        )


def broker(
    elder: Delegator,
    decision: decide.Decision,
    *,
    runs: Path,
    deadline: Deadline,
    denied: denials.Told,
    used: Callable[[int], None],
    grace_seconds: float,
    start: Start | None,
    keep: Collection[int],
    alive: int | None = None,
    spawns: Callable[[ChildManager, Broker], None] | None = None,
) -> Broker | None:
    """Make the agent's broker with the requests that its policy allows. Returns None where the policy has none.

    ``alive`` is at its end of file when the run's own parent is gone. ``spawns`` is called where
    children may be started.
    """
    if command.BROKER_FLAG not in decision.artefacts.json("runtime.json")["flags"]:
        return None
    made = Broker()
    if start is not None and decision.effective.spawning.allowed:
        child_manager = ChildManager(
            elder.member(decision),
            start=start,
            use=functools.partial(_use, runs / elder.run_id, decision.artefacts.json("cgroup.json")["overhead"]["mb"]),
            denied=denied,
            used=used,
            grace_seconds=grace_seconds,
            keep=keep,
            ending=functools.partial(ending, runs / elder.run_id, alive, decision.effective.spawning.on_parent_exit),
        )
        child_manager.served_by(made)
        begin = functools.partial(child_manager.started, deadline.milliseconds / 1000)
        made.add(child_manager.table, begin=begin, close=child_manager.close, look=child_manager.look)
        if spawns is not None:
            spawns(child_manager, made)
    return made


def ending(place: Path, alive: int | None, fate: str) -> errors.CovenantError | None:
    """Return why the run may start nothing now: it winds down, or is suspended."""
    if (refused := standing(place)) is not None:
        return refused
    gone = alive is not None and fate != "adopt" and children.gone(alive)
    return errors.ParentEndedError("the run that asked for it is being ended") if gone else None


def standing(place: Path) -> errors.CovenantError | None:
    """Return why the run of that directory may start nothing now: it is suspended, or being ended."""
    state = (place / registry.STATE).read_text().strip()
    if state == State.SUSPENDED:
        return errors.WrongStateError("the run that asked for it is suspended", hint="ask again once it goes on")
    return errors.ParentEndedError("the run that asked for it is being ended") if state == State.TERMINATED else None


def _use(directory: Path, overhead_mb: int) -> Drawn:
    """Return the part of its ceilings that the parent uses itself: memory beyond its sandbox's own, and one process.

    Its processor time is the part that its children leave.
    """
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), directory.name)
    leaf.adopt(rundir_directory.cgroups_of(directory))
    return Drawn(memory_mb=max(0, leaf.memory_bytes() // _MIB - overhead_mb), pids_max=1)


def end_below(runs: Path, run_id: str, by: str, reason: str) -> None:
    """Stop each run below this one, where the process that was to end the tree was killed.

    The shim of each run ends it then (``shim.operations``). A shim that does not answer keeps no other run alive.
    """
    until, asked = time.monotonic() + PATIENCE_SECONDS, {run_id}
    while moving := [one for one in registry.subtree(registry.live(runs), run_id) if one.run_id not in asked]:
        for one in moving:
            try:
                _have_end(one.path, by=by, reason=reason)
            except errors.NoRunError:
                if time.monotonic() < until:  # it listens a moment after it is visible, or is gone
                    time.sleep(_AGAIN_SECONDS)
                    continue
            except errors.CovenantError:
                pass
            asked.add(one.run_id)


def _have_end(path: Path, *, by: str, reason: str) -> None:
    try:
        control_socket.ask(path, "suspend", by=by, reason=reason, ending=True)
    except (errors.NotEnforceableError, errors.WrongStateError, errors.KernelError):
        control_socket.ask(path, "kill", by=by, reason=reason)  # it is just starting, or nothing stops it


def narrowed(lineage: Lineage, manifest: Manifest, runs: Path) -> Effective | None:
    """Narrow a child's wishes by its parent, for the look at the host. None: the child takes nothing.

    Raises:
        errors.ParentEndedError: the run that asked for it has ended.
    """
    if lineage.on_excess == "reject" and lineage.only is None:
        return None
    wishes = nine.requested(manifest, roles=data.roles())
    if lineage.only is not None:
        wishes = wishes.meet(lineage.only)
    return delegate(lineage.present(registry.live(runs)), wishes).granted


def missing(lineage: Lineage | None, manifest: Manifest) -> tuple[str, ...]:
    """Return the required capabilities that the caller does not hold.

    An operator holds all. An agent hands on those that its own caller was shown to hold.
    """
    required = manifest.capabilities.required
    return () if lineage is None else tuple(sorted(set(required) - lineage.parent.capabilities))


def refuse_backend(backend: str) -> errors.BackendError:
    """Return the error for a child of a confined agent that would not be confined."""
    return errors.BackendError(
        f"an agent starts no agent of backend `{backend}`",
        hint='write backend = "linux-gvisor"',
        grant="sandbox.backend",
    )

"""The supervisor in one process, as root: it holds COVENANT_STATE, recovers what a dead one left, and runs.

Log first, act second: a refusal and a start are durable before anything follows from them, and an act whose line
cannot be written does not happen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from policy import base58, decide, errors, standby
from policy.audit_log import events
from sandbox import config as configuration
from sandbox import progress
from sandbox.audit import open_runs, run_events
from sandbox.audit.log import Ledger
from sandbox.broker.children import ChildRequest, Say
from sandbox.broker.tool_servers import ServerRequest
from sandbox.control import succession
from sandbox.lifecycle import child_run, server_run
from sandbox.lifecycle.context import RunContext
from sandbox.lifecycle.run import Request, Run, RunDependencies
from sandbox.lifecycle.types import ToolSource
from sandbox.network import gateway
from sandbox.rootfs.skeleton import Skeletons
from sandbox.run_result import RunResult
from sandbox.runner import recovery
from sandbox.shim import signals
from sandbox.standby import dispatch, instance, wanted
from sandbox.standby.wanted import Wanted
from sandbox.storage import files_read
from sandbox.storage.package_store import PackageStore
from sandbox.storage.trust_state import State

# A root directory is a copy that can be made again; one that no run used for a week is a runtime of the past.
UNUSED_ROOT_SECONDS = 7 * 86400

__all__ = ["Request", "RunResult", "Supervisor"]


def open_ledger(state: Path) -> Ledger:
    """The supervisor's log in COVENANT_STATE."""
    return Ledger.open(state / "audit", head=state / "audit-head" / "head.json")


class Supervisor:
    """Hold COVENANT_STATE for one process. Use as a context manager.

    ``never_granted`` are host paths that no manifest may name besides those of the data file: COVENANT_HOME.
    ``keeps_standby`` says that a pool makes instances ahead, which then are used (sandbox.serve.standby_pool).
    ``isolated`` says that no agent may have the host's network here. ``below`` are descriptors that end every run
    started from here, children that outlive their parent included (run_io.ContainerIO.watches).

    Raises:
        errors.PrivilegeError: Raised when the process is not root.
    """

    def __init__(self, state: Path, *, never_granted: tuple[str, ...] = ()) -> None:
        if os.geteuid() != 0:
            raise errors.PrivilegeError("running an agent needs root", hint="run it with sudo, and give COVENANT_HOME")
        self.path = state
        self._seen = files_read.look(configuration.files(state))
        self.config = configuration.load(state)
        self.never_granted = never_granted
        self.policies = decide.Policies()
        self.keeps_standby = False
        self.isolated = False
        self.below: gateway.Watches = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        with self._stack:
            self._stack.enter_context(signals.detach_from_terminal())
            self.state = self._stack.enter_context(State(self.path))
            self.ledger = self._stack.enter_context(open_ledger(self.path))
            for name in ("runs", "uids", "packages", "rootfs"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            self.recover()
            PackageStore(self.path / "packages").sweep()
            # An earlier version kept parts of run directories there.
            shutil.rmtree(self.path / "spare", ignore_errors=True)
            if (self.path / "rootfs" / "images").exists():
                # Imported only here: most hosts have no layers, and a cold start pays for each import.
                from sandbox.layers.images import RootImages

                RootImages(self.path).collect(unused_seconds=UNUSED_ROOT_SECONDS)
            if (self.path / "workspaces").exists():
                # Imported only here, as the images of layers.
                from sandbox.workspace import operations

                operations.recover(self.path)
            if (self.path / "volumes").exists():
                from sandbox.volumes.store import VolumeStore

                VolumeStore(self.path).recover()
            Skeletons(self.path / "rootfs").collect(unused_seconds=UNUSED_ROOT_SECONDS)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def serves(self) -> None:
        """Record the configuration that this supervisor serves under (``covenant doctor``)."""
        files_read.note(self.path, self._seen)

    def reload(self, check: Callable[[configuration.Config], None]) -> tuple[str, ...]:
        """Read the configuration again. Returns the changed keys that count only from the next start.

        The record stays as it was if there are some.

        Raises:
            errors.ConfigError: Raised when it is malformed or ``check`` refuses it. The present one stays.
        """
        seen = files_read.look(configuration.files(self.path))
        config = configuration.load(self.path)
        check(config)
        late = tuple(key for key in configuration.AT_START if getattr(config, key) != getattr(self.config, key))
        kept = {key: getattr(self.config, key) for key in late}
        self.config = config.model_copy(update=kept)
        if not late:
            self._seen = seen
            self.serves()
        return late

    @contextlib.contextmanager
    def in_shim(self) -> Iterator[Supervisor]:
        """The same in a forked shim (sandbox.shim.process): what is read is shared, what is locked is opened anew.

        A lock of a file belongs to its open description (flock(2)), and a fork shares it: two shims that had one
        would both have the turn.
        """
        own = copy.copy(self)
        with contextlib.ExitStack() as stack:
            own.state = stack.enter_context(State(self.path))
            own.ledger = stack.enter_context(open_ledger(self.path))
            yield own

    @contextlib.contextmanager
    def logged(self, issuer: Mapping[str, str], told: Callable[[str], None] = lambda event_id: None) -> Iterator[None]:
        """Around the reading of a package: what is refused before it can be asked for has its row as well, of whose id
        ``told`` is told."""
        try:
            yield
        except errors.CovenantError as e:
            fields, now_ms = events.rejection(e), int(time.time() * 1000)
            told(self.ledger.append("manifest_rejected", fields, issuer=issuer, now_ms=now_ms))
            raise

    def recover(self) -> None:
        """Take away what runs left whose shim is gone, and write down how they ended.

        From any process that may read the log. One that is not in the host's network (``isolated``) leaves there what
        lies there: it would find none of it, and take the note of it away.
        """
        used = functools.partial(open_runs.note_used, self.path)
        with progress.step("taking away what was left, and writing down how it ended"):
            recovery.recover(self.path / "runs", config=self.config, used=used, isolated=self.isolated)
            run_events.cut_off(self.ledger)
            _end_superseded(self)

    def dependencies(self) -> RunDependencies:
        """Return the dependencies that this supervisor gives to a run."""
        return RunDependencies(
            self.path,
            self.config,
            self.ledger,
            self.state,
            self.never_granted,
            self.policies,
            start_child=self._start_child,
            start_server=self._start_server,
            keeps_standby=self.keeps_standby,
            isolated=self.isolated,
            below=self.below,
        )

    def stand_by(self, one: Wanted, *, alive: int, told: int, tell: Callable[[bytes], None]) -> None:
        """Make an instance and hold it until it was used (sandbox.standby). Called in a thread of the standby worker.

        The instance ends in any state when ``told`` is readable.

        Raises:
            errors.CovenantError: Raised when it could not be made, or the machine failed it.
        """
        with self.in_shim() as own:
            issuer = {"display": standby.ISSUER, "pubkey": base58.encode(own.ledger.public_key.public_bytes_raw())}
            request = Request(one.read(self.path), "-", issuer, package_name=one.package_name)
            dependencies = structs.replace(own.dependencies(), watches={told: instance.ended})
            instance.keep(dependencies, request, alive=alive, tell=tell)

    def _start_child(self, parent: Request, child_request: ChildRequest, say: Say) -> None:
        """In the shim of a child, forked from its parent's."""
        with self.in_shim() as own:
            child_run.run_child(structs.replace(own.dependencies(), watches=self.below), parent, child_request, say)

    def _start_server(self, parent: Request, source: ToolSource, asked: ServerRequest) -> None:
        """In the shim of a tool server, forked from its agent's."""
        with self.in_shim() as own, contextlib.ExitStack() as stack:
            state = stack.enter_context(own.state.dev(parent.dev)) if parent.dev else own.state
            dependencies = structs.replace(own.dependencies(), state=state, watches=self.below)
            server_run.run_server(dependencies, parent, source, asked)

    def run(
        self,
        request: Request,
        *,
        watches: gateway.Watches | None = None,
        after: contextlib.ExitStack | None = None,
    ) -> RunResult:
        """Decide and run. ``watches`` are descriptors that may end the run (run_io.ContainerIO.watches).

        The caller closes ``after`` once it has sent the answer (spec.SandboxSpec).

        Raises:
            errors.CovenantError: Raised when the run was refused before its start, or the machine failed. Both are in
            the
                log.
        """
        # What comes with its caller cannot be there ahead of it.
        given = request.workspace is not None or request.daemon is not None
        if self.keeps_standby and not request.dev and request.user is None and not given:
            ready = dispatch.dispatch(self.path / "runs", request, watches or {}, settings=self.config.digest)
            if ready is not None:
                return ready
        idle = dispatch.giving_way(self.path / "runs")
        while True:
            try:
                return self._run_cold(request, watches, after)
            except errors.ResourceViolation as e:
                # Idle instances give way to a run that a client asked for: as few as make up for the missing memory.
                freed, missing = 0, e.details.get("missing_mb", 0)
                # End none where all of them would not be enough, or where memory is not what is missing. Otherwise a
                # caller could end all of them, as often as it likes.
                if not self.keeps_standby or not 0 < missing <= dispatch.idle_mb(self.path / "runs"):
                    raise
                while freed < missing and (held := next(idle, 0)):
                    freed += held
                if not freed:
                    raise

    def _run_cold(
        self, request: Request, watches: gateway.Watches | None, after: contextlib.ExitStack | None
    ) -> RunResult:
        with contextlib.ExitStack() as stack:
            state = stack.enter_context(self.state.dev(request.dev)) if request.dev else self.state
            dependencies = structs.replace(self.dependencies(), state=state, watches=watches or {}, after=after)
            context = RunContext(dependencies, request, now_ms=int(time.time() * 1000))
            answer = Run(context).go()
            if context.standby and answer.error is None:
                wanted.want(
                    self.path,
                    request.package,
                    agent_id=answer.agent_id,
                    count=context.standby,
                    package_name=request.package_name,
                )
            return answer


def _end_superseded(own: Supervisor) -> None:
    """End the runs of an older package, where the process that had a newer serial accepted was killed over it."""

    def write(fields: Mapping[str, Any]) -> None:
        issuer = {"display": "recovery@local", "pubkey": base58.encode(own.ledger.public_key.public_bytes_raw())}
        fields = {"operator": None, **fields}
        own.ledger.append("runs_stopped", fields, issuer=issuer, now_ms=int(time.time() * 1000))

    succession.enforce(own.path / "runs", own.state, setting=own.config.on_newer_serial, write=write)

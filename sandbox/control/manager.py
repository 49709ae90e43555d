"""Operations over all runs: list, log, wait, kill, suspend and resume.

A command of root and a shim of the supervisor both use them. The live runs are read from their directories
(registry). The shim of a run does an operation on it (shim.control_socket, shim.operations). The archive holds the
records of runs that ended.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Struct

from policy import base58, errors
from policy.lifecycle import State
from sandbox.audit import open_runs, run_archive
from sandbox.audit.log import Ledger
from sandbox.control import metrics, tree_kill
from sandbox.rundir import admission, directory, lock, marks, registry
from sandbox.rundir.registry import Entry
from sandbox.shim import control_socket

Operation = Literal["suspend", "resume", "kill"]
# What ``logs`` shows.
Stream = Literal["stderr", "stdout"]
T = TypeVar("T")
# Limit of a stop or an end, and the interval of looks meanwhile.
PATIENCE_SECONDS, _AGAIN_SECONDS = 15.0, 0.02
# Pause of a waiter whose place another one took.
_PUSHED_OUT_SECONDS = 0.25
# An ending run may first wait for its children: their grace, and then twice their time to exit
# (sandbox.broker.children).
_GONE_SECONDS = 120.0
# Deeper than any manifest may say that a tree is.
_MOST_ABOVE = 64


class Requester(Struct, frozen=True):
    """Identify a requester: ``display`` is its name in labels and rows; ``root`` may see and end all runs."""

    display: str
    root: bool

    def may(self, displays: Iterable[str]) -> bool:
        """Whether a run with these names belongs to the requester, or the requester is root."""
        return self.root or self.display in displays


def listed(state: Path, requester: Requester) -> list[dict[str, Any]]:
    """Return the live runs that the requester may see, parents before children, each as ``ps --json`` shows it."""
    entries = visible_runs(state, requester)
    below = {entry.run_id: registry.subtree(entries, entry.run_id) for entry in entries if not _above(entry, entries)}
    return [_shown(entry) for tree in below.values() for entry in tree]


def used(state: Path, requester: Requester) -> list[dict[str, Any]]:
    """Return the live runs that the requester may see, parents before children, each as ``top --json`` shows it."""
    counted = metrics.tally(state, whole=False)
    for _ in counted.read():
        pass
    return [seen.to_json() for seen in metrics.used(visible_runs(state, requester), counted)]


def operate(
    state: Path,
    requester: Requester,
    operation: Operation,
    run: str,
    *,
    reason: str = "",
    tree: bool = False,
    grace_ms: int | None = None,
) -> list[str]:
    """Do it to the run whose id begins so, and with ``tree`` to everything below it; the ids of those it was done to.

    What is to be ended is gone when this returns; with ``grace_ms`` a single run is asked first, and has
    so long.

    Raises:
        errors.NoRunError: there is no such run.
        errors.WrongStateError: a run is in a state in which this cannot be done.
        errors.KeeperError: a run did not answer, or did not end.
    """
    if operation == "kill" and tree:
        return _kill_tree(state, requester, run, reason)
    chosen = _find(visible_runs(state, requester), run)
    ask = _Ask(state, requester, reason)
    if not tree:
        ask(operation, chosen, **({} if grace_ms is None or operation != "kill" else {"grace_ms": grace_ms}))
        done = [chosen.run_id]
    elif operation == "resume":
        done = [one.run_id for one in reversed(ask.subtree(chosen.run_id)) if ask.where_it_can(operation, one)]
    else:
        done = ask.stop(chosen)
    if operation == "kill":
        _until_gone(state, done)
    return done


def _kill_tree(state: Path, requester: Requester, run: str, reason: str) -> list[str]:
    # Agents that are to be ended may keep every processor from us (kernel.urgent).
    with tree_kill.urgent():
        chosen = _find(visible_runs(state, requester), run)
        ask = _Ask(state, requester, reason)
        done = ask.end(chosen)
    _until_gone(state, done)
    # A child that a shim was just starting is there only when its parent is gone, and may outlive it.
    while ask.subtree(chosen.run_id):
        done += ask.end(chosen)
        _until_gone(state, done)
    if ask.unwritten is not None:
        raise ask.unwritten
    return done


def attach(state: Path, requester: Requester, run: str, pipes: Sequence[int], size: tuple[int, int]) -> str:
    """Connect three pipes (stdin, stdout, sizes) to the terminal of the run whose id begins so. Returns its id.

    Raises:
        errors.NoRunError: there is no such run, or it is another user's.
        errors.WrongStateError: it has no terminal, or is attached already.
        errors.KeeperError: it did not answer.
    """
    entries = [one for one in visible_runs(state, requester) if requester.may([one.issuer["display"]])]
    entry, (rows, columns) = _find(entries, run), size
    _asked(entry, "attach", fds=pipes, by=requester.display, rows=rows, columns=columns)
    return entry.run_id


def logs(state: Path, requester: Requester, run: str, offset: int = 0, *, stream: Stream = "stderr") -> dict[str, Any]:
    """Return the stderr of a run from ``offset`` on, in parts: ask again from ``next``. Or its stdout, once it failed.

    ``begins`` is where the text begins: later than ``offset`` when the part between was not kept. ``ends`` is where all
    that was said so far ends, and ``live`` says whether there may be more.

    Raises:
        errors.NoRunError: there is no such run, and no record of one.
        errors.CutOffError: its shim ended without a word; the next start writes down what became of it.
        errors.KeeperError: its shim does not answer, or is still writing its end.
    """
    return _once_begun(lambda: _logs(state, requester, run, offset, stream))


def newest(state: Path, requester: Requester, agent_id: str) -> str:
    """Return the id of the newest ended run of an agent that the requester may see.

    Raises:
        errors.NoRunError: no such run has a record.
    """
    for run_id in _theirs(state, requester, run_archive.ids(state), agent_id=agent_id):
        return run_id
    raise errors.NoRunError(f"no run of `{agent_id}` has a record", hint="covenant ps lists the live ones")


def _logs(state: Path, requester: Requester, run: str, offset: int, stream: Stream) -> dict[str, Any]:
    entries = [one for one in visible_runs(state, requester) if one.run_id.startswith(run)]
    if len(entries) == 1:
        try:
            # Of stdout only a terminal is shown: what others say so far is the beginning of an answer.
            answer = _asked(entries[0], "logs", offset=offset, stream=stream)
            return {"run_id": entries[0].run_id, "live": True, **answer}
        except errors.NoRunError:
            record = await_record(state, entries[0].run_id, time.monotonic() + PATIENCE_SECONDS)
    else:
        record = _record(state, requester, run)
    kept, total = (
        (record.stdout.encode(), record.stdout_bytes)
        if stream == "stdout"
        else (record.stderr.encode(), record.stderr_bytes)
    )
    begins, end = max(offset, total - len(kept)), max(offset, total)
    text = kept[len(kept) - max(0, total - begins) :] if total > begins else b""
    place = {"begins": begins, "next": end, "ends": end}
    return {"run_id": record.run_id, "live": False, **place, "text": text.decode(errors="replace")}


def ended(
    state: Path, requester: Requester, run: str, *, left: Callable[[], bool] = lambda: False
) -> run_archive.ArchivedRun | None:
    """Return the record of a run once it has ended. None: the requester has ``left``.

    Raises:
        errors.NoRunError: there is no such run, and no record of one.
        errors.CutOffError: its shim ended without a word; the next start writes down what became of it.
        errors.KeeperError: its shim does not answer, or is still writing its end.
    """
    return _once_begun(lambda: _ended(state, requester, run, left))


def _ended(state: Path, requester: Requester, run: str, left: Callable[[], bool]) -> run_archive.ArchivedRun | None:
    entries = [one for one in visible_runs(state, requester) if one.run_id.startswith(run)]
    if len(entries) != 1:
        return _record(state, requester, run)
    entry = entries[0]
    while not left():
        try:
            # The end of file is the end of the run. Another requester may take this place in the shim: then again.
            with control_socket.ControlConnection(entry.path) as connection:
                while not (over := connection.closed(0.25)) and not left():
                    pass
                if over and not (entry.path / control_socket.NAME).exists():
                    return await_record(state, entry.run_id, time.monotonic() + PATIENCE_SECONDS)
            # More waiting clients than the shim accepts would disconnect each other without a pause.
            time.sleep(_PUSHED_OUT_SECONDS)
        except errors.NoRunError:
            if not registry.under_way(entry.path) or not control_socket.until_there(entry.path, 1.0):
                return await_record(state, entry.run_id, time.monotonic() + PATIENCE_SECONDS)
            time.sleep(_AGAIN_SECONDS)
        except errors.KeeperError:
            time.sleep(_AGAIN_SECONDS)
    return None


class _Ask:
    """Do one operation on one run or many, in the name of its requester."""

    def __init__(self, state: Path, requester: Requester, reason: str) -> None:
        self._runs, self._requester = state / "runs", requester
        # As every shim takes it: an argument of a command may be of any length, and no text.
        self._reason = reason[: marks.WORDS].encode("utf-8", "backslashreplace").decode()
        # Why the log does not say in whose name a tree has ended.
        self.unwritten: errors.CovenantError | None = None

    def __call__(self, operation: Operation, entry: Entry, **more: Any) -> None:
        _asked(entry, operation, by=self._requester.display, reason=self._reason, **more)

    def subtree(self, run_id: str) -> list[Entry]:
        """Return the run and everything below it, parents first."""
        return registry.subtree(registry.live(self._runs), run_id)

    def where_it_can(self, operation: Operation, entry: Entry, **more: Any) -> bool:
        """Whether it was done: not to a run that ended meanwhile, or that is in no state for it."""
        try:
            self(operation, entry, **more)
        except (errors.NoRunError, errors.WrongStateError):
            return False
        return True

    def stop(self, entry: Entry) -> list[str]:
        """Suspend the whole subtree, parents first, and look again until nothing of it came in between.

        A run that is just starting cannot be suspended yet: it is asked again until it can.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        stopped: list[str] = []
        while moving := [one for one in self.subtree(entry.run_id) if one.state != State.SUSPENDED]:
            if time.monotonic() > until:
                raise errors.KeeperError(f"{len(moving)} runs of the tree could not be suspended")
            stopped += [one.run_id for one in moving if self.where_it_can("suspend", one)]
            if not stopped or moving[-1].run_id != stopped[-1]:
                time.sleep(_AGAIN_SECONDS)
        return stopped

    def end(self, entry: Entry) -> list[str]:
        """End the whole subtree: suspend every run, mark each, write one row that names them, and kill them together.

        Suspending first keeps a run from starting another meanwhile. The marks end the runs also where this process is
        killed. Like a revocation this asks no shim: running agents take the CPU from their shims, and each shim would
        write a row of its own. Only the shim of a run that could not be marked is asked, afterwards, because its agent
        may not be visible yet. A log that takes no row keeps no run alive: the error is in ``unwritten``.
        """
        ended: list[str] = []
        with tree_kill.sweep_lock(self._runs):
            while (caught := self._catch(entry.run_id, ended)).entries:
                unwritten = tree_kill.end(caught, functools.partial(self._tell, caught.entries), [])
                self.unwritten = unwritten or self.unwritten
                for one in caught.entries:
                    if marks.verdict(one.path) is None:
                        with contextlib.suppress(errors.CovenantError):  # whether it is gone is looked at
                            self("kill", one)
                ended += [one.run_id for one in caught.entries]
        return ended

    def _catch(self, run_id: str, known: Collection[str]) -> tree_kill.Caught:
        """Stop and mark the runs of the subtree that are not ``known`` yet.

        INVARIANT: behind the gate. A start below one of them, a resume of it or a reuse of its directory came before,
        or finds the mark.
        """
        with lock.gate(self._runs):
            below = registry.subtree(registry.seen(self._runs), run_id)
            found = [one for one in below if one.run_id not in known]
            mark = functools.partial(tree_kill.mark_stopped, found, self._requester.display, self._reason)
            return tree_kill.catch(found, mark, [])

    def _tell(self, entries: Sequence[Entry]) -> None:
        """Write the event that names them. It is durable when this returns."""
        state = self._runs.parent
        with Ledger.open(state / "audit", head=state / "audit-head" / "head.json") as log:
            # The requester's name by the kernel, and the key of the log that vouches.
            issuer = {
                "display": self._requester.display,
                "pubkey": base58.encode(log.public_key.public_bytes_raw()),
            }
            named = [{"run_id": one.run_id, "agent_id": one.agent_id} for one in entries]
            fields = {"operator": None, "reason": self._reason, "runs": named}
            log.append("runs_stopped", fields, issuer=issuer, now_ms=int(time.time() * 1000))


def visible_runs(state: Path, requester: Requester) -> list[Entry]:
    """Return the live runs that the requester may see."""
    entries = list(registry.agents(registry.live(state / "runs")))
    displays = {entry.run_id: entry.issuer["display"] for entry in entries}
    return [
        entry
        for entry in entries
        # An orphan still belongs to the issuer of the first run of its line.
        if requester.may(
            [
                entry.issuer["display"],
                entry.label.get(admission.CALLER, ""),
                *(displays.get(one, "") for one in entry.ancestors),
            ]
        )
    ]


def _above(entry: Entry, entries: Sequence[Entry]) -> bool:
    return any(one.run_id in entry.ancestors for one in entries)


def _find(entries: Sequence[Entry], run: str) -> Entry:
    found = [one for one in entries if one.run_id.startswith(run)]
    if len(found) != 1 or not run:
        how = "no live run has" if not found or not run else f"{len(found)} live runs have"
        raise errors.NoRunError(f"{how} an id that begins with `{run}`", hint="covenant ps lists them")
    return found[0]


def _shown(entry: Entry) -> dict[str, Any]:
    return {
        "run_id": entry.run_id,
        "agent_id": entry.agent_id,
        "intent_id": entry.label.get("intent_id") or None,
        "state": entry.state or str(State.ISOLATED),
        "parent": entry.parent or None,
        "depth": entry.depth,
        "issuer": entry.issuer["display"],
        "operator": entry.operator or None,
        "package": entry.package,
        "started_ms": entry.started_ms,
        "memory_mb": entry.memory_mb,
        "pids_max": entry.pids_max,
        "cpu_millis": entry.cpu_millis,
        "keeper": entry.keeper,
        # Empty for a run that was prewarmed, which speaks by lines.
        "contract": entry.label.get("contract", ""),
        "published": directory.published_of(entry.path),
        "services": directory.services_of(entry.path),
    }


def _record(state: Path, requester: Requester, run: str) -> run_archive.ArchivedRun:
    """Return the record of the run whose id begins with ``run``."""
    ending = open_runs.named(state, run)  # INVARIANT: before the archive, which has the record of a run without a mark
    found = [one for one in run_archive.ids(state) if one.startswith(run)] if run else []
    if not requester.root:
        # Other users' runs make no prefix ambiguous for this requester, which must not learn of them by that.
        found = list(_theirs(state, requester, found))
    gone = not found and ending is not None and not registry.under_way(state / "runs" / ending)
    if ending is not None and gone and requester.may(_started_by(state, ending)):
        # It is not live and has no record yet: its shim has still to write its end, or was killed.
        try:
            found = [await_record(state, ending, time.monotonic() + PATIENCE_SECONDS, unseen=True).run_id]
        except errors.CutOffError:
            if requester.root:
                raise
    record = run_archive.read(state, found[0]) if len(found) == 1 else None
    # A run that the requester may not see does not exist for it.
    if record is None or not requester.may(_asked_by(state, record.issuer, record.parent, _live(state))):
        how = f"{len(found)} runs have" if len(found) > 1 and requester.root else "no run, live or archived, has"
        raise errors.NoRunError(f"{how} an id that begins with `{run}`", hint="covenant ps lists the live ones")
    return record


def _theirs(state: Path, requester: Requester, run_ids: Sequence[str], *, agent_id: str | None = None) -> Iterator[str]:
    """Yield the ended runs, of an agent or of all, whose records the requester may see.

    A damaged record belongs to no requester; asked for alone, it is reported as damaged.
    """
    live = _live(state)
    for run_id in run_ids:
        try:
            record = run_archive.read(state, run_id)
        except errors.StateError:
            if len(run_ids) == 1:
                raise
            continue
        if record is None or agent_id not in (None, record.agent_id):
            continue
        if requester.may(_asked_by(state, record.issuer, record.parent, live)):
            yield run_id


def _started_by(state: Path, run_id: str) -> Iterator[str]:
    """Yield the requesters of a run without label and record, from its start event, otherwise as ``_asked_by``.

    A requester that may not see the run does not wait for its end.
    """
    event = open_runs.start_of(state, run_id)
    if event is not None:
        yield from _asked_by(state, event["issuer"]["display"], event["kind"].get("parent"), _live(state))


def _live(state: Path) -> dict[str, Entry]:
    return {entry.run_id: entry for entry in registry.live(state / "runs")}


def _asked_by(state: Path, issuer: str, parent: str | None, live: Mapping[str, Entry]) -> Iterator[str]:
    """Return the issuers of the run and of each run above it, by the records of ended and the labels of live runs."""
    yield issuer
    for _ in range(_MOST_ABOVE):
        if parent is None:
            return
        entry = live.get(parent)
        if entry is not None:
            # This run may outlive the first of its line: the runs above it and their records may be gone.
            yield entry.label.get(admission.CALLER, "")
            yield from (live[one].issuer["display"] for one in (parent, *entry.ancestors) if one in live)
            return
        above = run_archive.read(state, parent)
        if above is None:
            return
        yield above.issuer
        parent = above.parent


def _asked(entry: Entry, operation: str, **fields: Any) -> dict[str, Any]:
    """Send an operation to a run that may listen only a moment after it is visible.

    Raises:
        errors.NoRunError: Raised when it has ended.
        errors.KeeperError: Raised as by ``control_socket.ask``.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return control_socket.ask(entry.path, operation, **fields)
        except errors.NoRunError:
            if not registry.under_way(entry.path) or time.monotonic() > until:
                raise
            time.sleep(_AGAIN_SECONDS)


def await_record(state: Path, run_id: str, until: float, *, unseen: bool = False) -> run_archive.ArchivedRun:
    """Return the record of a run that has just ended: its shim writes it a moment later.

    An ``unseen`` run may also be about to begin.

    Raises:
        errors.CutOffError: it ended without a record.
        errors.KeeperError: there is no record in time.
    """
    while True:
        is_open = open_runs.is_open(state, run_id)
        if (record := run_archive.read(state, run_id)) is not None:
            return record
        if not is_open:
            raise errors.CutOffError(
                f"run `{run_id}` ended without a record: its keeper was killed", hint="the next start writes it down"
            )
        # The log is owed an end before the run can be seen.
        if unseen and registry.under_way(state / "runs" / run_id):
            raise _BegunError
        if time.monotonic() > until:
            raise errors.KeeperError(f"run `{run_id}` is still being begun, or its end written", hint="ask again")
        time.sleep(_AGAIN_SECONDS)


class _BegunError(Exception):
    """Raised when a run without a record had not begun at the first look, and has begun now."""


def _once_begun(ask: Callable[[], T]) -> T:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except _BegunError:
            if time.monotonic() > until:
                raise errors.KeeperError("the run's keeper does not answer", hint="ask again") from None
            time.sleep(_AGAIN_SECONDS)


def _until_gone(state: Path, run_ids: Sequence[str]) -> None:
    until = time.monotonic() + _GONE_SECONDS
    while left := {one.run_id for one in registry.live(state / "runs")} & set(run_ids):
        if time.monotonic() > until:
            raise errors.KeeperError(f"run `{min(left)}` was to end and is still there")
        time.sleep(_AGAIN_SECONDS)

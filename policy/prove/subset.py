"""A child beside its parent, both as compiled: nothing of the child lies outside of what its parent has.

Delegation is decided on grants (rule 4). This shows of the artefacts what was decided of the grants: by the calls that
pass with their arguments, destinations, mounts, programs with their content, and all other domains; and of several
children at once that what they may take at one time is there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from policy.compile.artefacts import Artefacts
from policy.decompile import calls
from policy.decompile import read as reading
from policy.decompile.calls import CallTable
from policy.decompile.read import Decompiled
from policy.grants.effective import ceilings_of_children
from policy.grants.resources import Ceilings, least
from policy.grants.sets.domain import Domain
from policy.grants.syscalls import SyscallSet
from policy.prove import granted_calls
from policy.prove.differences import Difference, check

# What is taken from a parent while a child lives, and given back after it (policy.rules.parent.Drawn).
SUMMED: Final = ("memory_mb", "pids_max", "cpu_millis")
_HINT = "the child's artefacts do not fit its parent's: nothing was started"


def within(child: Artefacts, parent: Artefacts, *, remaining_seconds: int | None) -> None:
    """Show that a child's artefacts allow nothing that its parent's do not.

    ``remaining_seconds`` is what is left of the parent's life, None when it has no end; one level of spawning is the
    child's own.

    Raises:
        errors.ProofError: they do; details as for ``policy.prove.prove``.
        errors.ArtefactError: either cannot be read back.
    """
    here, there = reading.read(child.files), reading.read(parent.files)
    check(_beyond(here, there, remaining_seconds), what="the child's artefacts", against="its parent's", hint=_HINT)


def _beyond(child: Decompiled, parent: Decompiled, remaining_seconds: int | None) -> Iterator[Difference]:
    ceilings = dict(parent.grants.domains())
    ceilings |= ceilings_of_children(parent.grants, remaining_seconds=remaining_seconds)
    for name, mine in child.grants.domains():
        if not mine.is_subset(ceilings[name]):
            yield Difference(name, mine.difference(ceilings[name]).describe() or (f"{name} of another form",))
    for holder, held in child.limits:
        most = dict(parent.limits).get(holder, parent.grants.resources)
        if not held.is_subset(most):
            yield Difference("resources", held.difference(most).describe()).of(holder)
    if child.arch != parent.arch:
        yield Difference("syscalls", (f"calls of {child.arch}",))
    passes = calls.excess(child.calls, _calls(parent, ceilings))
    yield Difference("syscalls", tuple(one.describe("the child's filter", "the parent's") for one in passes))


def _calls(parent: Decompiled, ceilings: Mapping[str, Domain]) -> CallTable:
    """The calls of the parent. Where it may give a network to children, with those that the network needs."""
    names = ceilings["syscalls"]
    if not parent.grants.may_grant.syscalls.names or not isinstance(names, SyscallSet):
        return parent.calls
    return granted_calls.table(names.names, network=True)


def within_sums(children: Iterable[Artefacts], parent: Artefacts, *, own: Mapping[str, int] | None = None) -> None:
    """Show that all live children together, and the parent's ``own`` use, fit the parent's ceilings of ``SUMMED``.

    Raises:
        errors.ProofError: they do not.
        errors.ArtefactError: an artefact cannot be read back.
    """
    above = _held(parent)
    taken: dict[str, int | None] = {name: (own or {}).get(name, 0) for name in SUMMED}
    for child in children:
        held = _held(child)
        for name in SUMMED:
            taken[name] = functools.reduce(_higher, (_plus(taken[name], getattr(one, name)) for one in held))
    lines = []
    for name, amount in taken.items():
        ceiling = functools.reduce(least, (getattr(one, name) for one in above))
        if ceiling is not None and (amount is None or amount > ceiling):
            lines.append(f"{name} {'not limited' if amount is None else amount} of {ceiling}")
    check([Difference("resources", tuple(lines))], what="live children", against="their parent", hint=_HINT)


def _held(artefacts: Artefacts) -> tuple[Ceilings, ...]:
    """The ceilings by each of their holders: which of them a machine has is not known here."""
    return tuple(resources for _, resources in reading.read(artefacts.files).limits)


def _higher(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b

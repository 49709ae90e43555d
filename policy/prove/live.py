"""Prove that the kernel allows a running agent no more than was proved of its artefacts.

    (1) each layer's read-out is put in the place of what was compiled      policy.decompile.live
    (2) a layer that comes out as it was compiled allows what was proved of it, and nothing is read twice
    (3) any other is read as artefacts are, and compared domain by domain: calls with their arguments, ceilings by
        each of their holders, what is started and from which files

A limit that was lowered is no drift. Rules, mounts, flags or a configuration that differ from those that were made are
drift, even if they grant no more. So is a part that cannot be read: it came from no grant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final

from msgspec import Struct

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.decompile import calls, live
from policy.decompile import read as reading
from policy.decompile.documents import shown
from policy.decompile.live import Readout
from policy.decompile.read import Decompiled
from policy.prove.differences import Difference


class Standing(StrEnum):
    """How a layer stands to what was proved: with the first two it holds."""

    EQUAL = "equal"
    NARROWER = "narrower"
    OTHER = "other"
    WIDER = "wider"
    UNREADABLE = "unreadable"


# Layers that an operator may well narrow while an agent runs.
_LOWERED: Final = frozenset({"cgroup"})


class Layer(Struct, frozen=True):
    """One layer's answer. ``expected`` and ``found`` say the first thing that is not within what was proved."""

    name: str
    standing: Standing
    expected: str = ""
    found: str = ""

    @property
    def holds(self) -> bool:
        """Whether it allows nothing beyond the manifest."""
        return self.standing in (Standing.EQUAL, Standing.NARROWER)


def compare(compiled: Artefacts, found: Readout) -> tuple[Layer, ...]:
    """Every layer of a live run beside the artefacts that it was started from, which were proved before."""
    return tuple(_layer(name, compiled, made) for name, made in live.layers(compiled.files, found).items())


def _layer(name: str, compiled: Artefacts, made: Callable[[], dict[str, bytes]]) -> Layer:
    try:
        # (1), (2)
        there = made()
        if all(compiled.files[file] == held for file, held in there.items()):
            return Layer(name, Standing.EQUAL)
        # (3)
        before, now = reading.read(compiled.files), reading.read({**compiled.files, **there})
        wider = [line for difference in _beyond(now, before) for line in difference.wider]
    except errors.ArtefactError as e:
        return Layer(name, Standing.UNREADABLE, "as it was compiled and proved", live.said(e))
    if not wider and name in _LOWERED:
        return Layer(name, Standing.NARROWER)
    if not wider:
        return Layer(name, Standing.OTHER, "as it was compiled and proved", "something else that grants no more")
    more = f" and {len(wider) - 1} more" if len(wider) > 1 else ""
    return Layer(name, Standing.WIDER, "nothing beyond the grants", f"{wider[0]}{more}")


def _beyond(now: Decompiled, before: Decompiled) -> Iterator[Difference]:
    """Return the grants that are allowed now and were not proved."""
    ceilings = dict(before.grants.domains())
    for name, mine in now.grants.domains():
        if not mine.is_subset(ceilings[name]):
            yield Difference(name, mine.difference(ceilings[name]).describe() or (f"{name} of another form",))
    for holder, held in now.limits:
        most = dict(before.limits)[holder]
        if not held.is_subset(most):
            yield Difference("resources", held.difference(most).describe()).of(holder)
    passes = calls.excess(now.calls, before.calls)
    yield Difference("syscalls", tuple(one.describe("the filter", "the proved one") for one in passes))
    for what, here, there in (
        ("machine", now.arch, before.arch),
        ("program", list(now.args), list(before.args)),
        ("runsc", now.runsc.sha256, before.runsc.sha256),
        ("runtime", now.seen.runtime.digest, before.seen.runtime.digest),
        ("ways", _ways(now), _ways(before)),
    ):
        if here != there:
            yield Difference("facts", (f"{what} {shown(here)} instead of {shown(there)}",))


def _ways(one: Decompiled) -> str:
    """The mode of the network; where packets may go stands in the grants."""
    return one.reached.mode

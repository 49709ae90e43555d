"""Evaluate a table of nft rules for all packets of one kind at once: the end of each port, for given sets.

A *kind* fixes everything but destination and port. The rules of a hook that can match the kind are laid out in one
line, chains in the place where they are called, so that every jump leads forward. For one destination only the sets
that hold it matter; ports then flow down the line as spans, each rule taking its own out. Two destinations in the same
sets fare alike, so the whole address space is as many evaluations as there are different memberships.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from policy.decompile.network import nft
from policy.decompile.network.nft import ReadRule, Table
from policy.decompile.network.packets import ACCEPT, MAX_DEPTH, Outcome
from policy.grants.sets import spans
from policy.grants.sets.spans import Spans

ALL: Final[Spans] = ((0, 65535),)
PROTOCOLS: Final = ("tcp", "udp", nft.NEIGHBOUR, "other")
# How a packet ends that no rule ends: by the policy of the chain.
POLICY: Final[Outcome] = ("policy", 0)
# Ours have a few hundred. Chains that are called from many places count each time.
_MAX_STEPS: Final = 1 << 16


class PacketKind(Struct, frozen=True):
    """All packets of a hook that agree in this. ``protocol`` is one of ``PROTOCOLS``, ``over`` as in ``Packet``."""

    hook: str
    protocol: str
    iif: str = ""
    oif: str = ""
    established: bool = False
    dnat: bool = False
    uid: int | None = None
    over: bool = False

    def matches(self, rule: ReadRule) -> bool:
        """Whether the rule can match a packet of this kind, by everything but destination and port."""
        return (
            rule.iif in (None, self.iif)
            and rule.oif in (None, self.oif)
            and rule.protocol in (None, self.protocol)
            and (not rule.established or self.established)
            and (not rule.dnat or self.dnat)
            and rule.uid in (None, self.uid)
            and (rule.limit is None or self.over)
        )


@dataclass(slots=True)
class _Label:
    """A place in the line that is known when everything before it has been laid out."""

    at: int = -1


@dataclass(frozen=True, slots=True)
class Step:
    """One rule in the line, for destinations in all of ``sets`` and the ports in ``ports`` (None: every port).

    With an ``outcome`` it ends those; else those that match go on with the next step and the others at ``otherwise``
    (a call), or those that match go on at ``then`` (a return).
    """

    line: int
    sets: tuple[str, ...]
    ports: Spans | None
    outcome: Outcome | None = None
    otherwise: _Label | None = None
    then: _Label | None = None

    @property
    def certain(self) -> bool:
        """Whether every packet of the kind that comes here matches."""
        return not self.sets and self.ports is None


class _Ends(Struct, frozen=True):
    """The result for all ports: those that are accepted, and the parts of the line that some of them passed."""

    by_outcome: Mapping[Outcome, Spans]
    accepted: Spans
    open: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Flow:
    """The rules for one kind of packet. Made by ``of``."""

    policy: str
    steps: list[Step]
    _always: list[int] = field(default_factory=list)
    _by_set: dict[str, list[int]] = field(default_factory=dict)
    _known: dict[frozenset[str], _Ends] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Table, kind: PacketKind) -> Flow:
        """Lay out the rules of the kind's hook.

        Raises:
            errors.ArtefactError: the chains call one another too deeply or too often, or a rule asks for a device
                that the hook does not know.
        """
        chain = table.chains.get(kind.hook)
        flow = cls("accept" if chain is None else chain.policy, [])
        if chain is not None:
            end = _Label()
            flow._lay(table, kind, chain, (), end, 0)
            end.at = len(flow.steps)
        for at, step in enumerate(flow.steps):
            if step.sets:
                flow._by_set.setdefault(step.sets[-1], []).append(at)
            else:
                flow._always.append(at)
        return flow

    def _lay(
        self, table: Table, kind: PacketKind, chain: nft.ReadChain, held: tuple[str, ...], end: _Label, depth: int
    ) -> None:
        for rule in chain.rules:
            _known_device(kind, rule)
            if not kind.matches(rule) or rule.verdict.kind == "log":
                continue
            sets = held if rule.addresses is None or rule.addresses in held else (*held, rule.addresses)
            verdict = rule.verdict
            if verdict.kind == "return":
                self._add(Step(rule.line, sets, rule.ports, then=end))
            elif not verdict.chain:
                self._add(Step(rule.line, sets, rule.ports, (verdict.kind, verdict.port)))
            else:
                if depth >= MAX_DEPTH:
                    raise nft.refuse(rule.line, "the chains call one another too deeply")
                after = _Label()
                self._add(Step(rule.line, sets, rule.ports, otherwise=after))
                last = after if verdict.kind == "jump" else end
                self._lay(table, kind, table.chains[verdict.chain], sets, last, depth + 1)
                if verdict.kind == "goto":
                    self._add(Step(rule.line, sets, None, then=end))
                after.at = len(self.steps)
            if verdict.kind != "jump" and sets == held and rule.ports is None:
                return  # every packet that came into the chain has left it: what follows is never reached

    def _add(self, step: Step) -> None:
        if len(self.steps) >= _MAX_STEPS:
            raise nft.refuse(step.line, "the chains call one another too often")
        self.steps.append(step)

    def ports(self, sets: frozenset[str]) -> Mapping[Outcome, Spans]:
        """How the ports end for a destination that is in exactly these sets; all of them, each once.

        Those that no rule ends stand under ``POLICY``.
        """
        return self._ends(sets).by_outcome

    def accepted(self, sets: frozenset[str]) -> Spans:
        """The ports that are accepted, by a rule or by the policy."""
        return self._ends(sets).accepted

    def places(self, sets: Iterable[str]) -> tuple[int, ...]:
        """Where in the line rules for any of these sets stand, in order."""
        return tuple(sorted({at for name in sets for at in self._by_set.get(name, ())}))

    def passes(self, sets: frozenset[str], places: Sequence[int]) -> bool:
        """Whether a packet to a destination in ``sets`` comes by any of these places of the line.

        May say yes where the truth is no.
        """
        return any(
            bisect.bisect_left(places, first) < bisect.bisect_left(places, last)
            for first, last in self._ends(sets).open
        )

    def _ends(self, sets: frozenset[str]) -> _Ends:
        mine = sets.intersection(self._by_set)
        found = self._known.get(mine)
        if found is None:
            found = self._known[mine] = self._evaluate(mine)
        return found

    def _evaluate(self, sets: frozenset[str]) -> _Ends:
        ended: dict[Outcome, Spans] = {}
        waiting: dict[int, Spans] = {}  # ports that jumped ahead, by where to
        walked: list[tuple[int, int]] = []
        flowing, since = ALL, 0
        for at in sorted([*self._always, *itertools.chain.from_iterable(self._by_set[name] for name in sets)]):
            step = self.steps[at]
            if not sets.issuperset(step.sets):
                continue
            if waiting:
                flowing, since = _landed(waiting, flowing, since, at)
            if not flowing:
                if not waiting:
                    break
                continue
            walked.append((since, at))
            taken, left = _split(flowing, step.ports)
            if step.outcome is not None:
                ended[step.outcome] = spans.union(ended.get(step.outcome, ()), taken)
                flowing = left
            elif step.otherwise is not None:
                _send(waiting, step.otherwise, left)
                flowing = taken
            elif step.then is not None:
                _send(waiting, step.then, taken)
                flowing = left
            since = at + 1
        end = len(self.steps)
        flowing, since = _landed(waiting, flowing, since, end)
        if flowing:
            walked.append((since, end))
            ended[POLICY] = flowing
        accepted = ended.get(ACCEPT, ())
        if self.policy == "accept":
            accepted = ALL if ended.keys() <= {ACCEPT, POLICY} else spans.union(accepted, flowing)
        return _Ends({outcome: ports for outcome, ports in ended.items() if ports}, accepted, tuple(walked))

    def barrier(self) -> int | None:
        """The line of a rule that drops every packet of the kind before any rule could accept one; None without one.

        0 stands for the policy. Judged without looking at sets and ports: may say None where the truth is a line.
        """
        live = 0  # steps before it are jumped over by every packet
        together = 0  # steps before it may be jumped over by some
        for at, step in enumerate(self.steps):
            if at < live:
                continue
            if step.outcome is None:
                target = step.then or step.otherwise
                if step.then is not None and step.certain and at >= together:
                    live = step.then.at
                elif target is not None and not (step.certain and step.then is None):
                    together = max(together, target.at)
            elif step.outcome[0] != "drop":
                return None
            elif step.certain and at >= together:
                return step.line
        return 0 if self.policy == "drop" else None

    def open(self) -> bool:
        """Whether a rule accepts every packet of the kind before any other rule ends one."""
        for step in self.steps:
            if not step.certain or step.then is not None:
                return False
            if step.outcome is not None:
                return step.outcome == ACCEPT
        return self.policy == "accept"


def _known_device(kind: PacketKind, rule: ReadRule) -> None:
    """nft takes a rule that asks for a device where there is none; such a rule says something else than it does."""
    if (rule.iif is not None and not kind.iif) or (rule.oif is not None and not kind.oif):
        raise nft.refuse(rule.line, f"hook {kind.hook} does not know this device")
    if rule.uid is not None and kind.hook != "output":
        raise nft.refuse(rule.line, f"hook {kind.hook} does not know whose packet it is")


def _landed(waiting: dict[int, Spans], flowing: Spans, since: int, at: int) -> tuple[Spans, int]:
    """The ports that flow at a place, and the first place that some of them passed."""
    for target in [one for one in waiting if one <= at]:
        since = min(since, target) if flowing else target
        flowing = spans.union(flowing, waiting.pop(target))
    return flowing, since


@functools.lru_cache(maxsize=512)
def _complement(ports: Spans) -> Spans:
    """All other ports. Most destinations are in one set, whose rule stands in several chains."""
    return spans.minus(ALL, ports)


def _split(flowing: Spans, ports: Spans | None) -> tuple[Spans, Spans]:
    """Those of the ports that flow which a rule takes, and those which it leaves."""
    if ports is None:
        return flowing, ()
    if flowing == ALL:
        return ports, _complement(ports)
    taken = spans.meet(flowing, ports)
    return taken, spans.minus(flowing, taken) if taken else flowing


def _send(waiting: dict[int, Spans], label: _Label, ports: Spans) -> None:
    if ports:
        waiting[label.at] = spans.union(waiting.get(label.at, ()), ports)


def memberships(where: tuple[int, int], sets: Iterable[tuple[str, Spans]]) -> Iterator[tuple[int, int, frozenset[str]]]:
    """The whole of ``where``, cut wherever a set begins or ends, with the sets that hold each piece."""
    turns: dict[int, list[tuple[str, bool]]] = {where[0]: []}
    for name, pieces in sets:
        for first, last in pieces:
            turns.setdefault(first, []).append((name, True))
            turns.setdefault(last + 1, []).append((name, False))
    inside: set[str] = set()
    cuts: Sequence[int] = sorted(turns)
    for at, cut in enumerate(cuts):
        for name, enters in turns[cut]:
            (inside.add if enters else inside.discard)(name)
        last = cuts[at + 1] - 1 if at + 1 < len(cuts) else where[1]
        if cut <= last:
            yield cut, last, frozenset(inside)


def unordered(flow: Flow, order: Sequence[str], ignored: Collection[str]) -> int | None:
    """The line of a rule for which a destination in more sets could fare worse than in each of them; None without one.

    ``order`` holds verdicts from the strongest to the weakest; ``policy`` among them is the verdict of the chain,
    and 0 is its line. When all rules but those for the sets ``ignored`` end packets in that order, and none jumps
    ahead, what is in several sets has what each of them gives.
    """
    rank = {verdict: at for at, verdict in enumerate(order)}
    reached = live = 0
    for at, step in enumerate(flow.steps):
        if at < live or any(name in ignored for name in step.sets):
            continue
        if step.outcome is None:
            if not step.certain:
                return step.line
            live = step.then.at if step.then is not None else live
            continue
        if (strength := rank.get(step.outcome[0], -1)) < reached:
            return step.line
        reached = strength
        if step.certain:
            return None
    return 0 if rank.get("policy", rank.get(flow.policy, -1)) < reached else None

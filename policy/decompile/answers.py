"""Evaluate a filter for every call: each architecture tag, each number, each value of the arguments.

`bpf.decide` runs a program on one call; here it is run on all at once. Tag and number are followed as ranges: a
comparison with a constant cuts a range in two or three, so the spans found are apart and cover all 2^32 tags
and numbers. From the first load of an argument on, the rest of the program is a function of the arguments alone,
and is read backwards, from its returns to that load: what a test leads to is what its two branches lead to, each under
the test's outcome (policy.decompile.conditions). Programs only jump forward, so each instruction is read once for each
word that can be in the accumulator there, however many paths lead to it.

A program that compares number or tag again after it has looked at an argument, masks them, or looks at the
instruction pointer is refused: no seccomp compiler writes one, and one that is half read proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from policy import errors
from policy.decompile import bpf, conditions
from policy.decompile.bpf import Range
from policy.decompile.conditions import Condition

_TOP: Final = 0xFFFFFFFF
_NEGATED: Final = {"==": "!=", ">": "<=", ">=": "<", "&": "!&"}
_EVERY: Final = (0, _TOP)
_SPANNED: Final = frozenset({bpf.NUMBER, bpf.ARCH})
# The tests that a range can hold (==, >, >=): how far above the constant it begins, and whether it ends there.
_BOUNDS: Final = {0x15: (0, True), 0x25: (1, False), 0x35: (0, False)}

# (instruction, word in the accumulator, mask laid over it)
_State = tuple[int, int, int]


class Rest(Struct, frozen=True):
    """The answer to a call: each action that some arguments get, and the condition of the requested action."""

    actions: frozenset[int]
    when: Condition


class FilterAnswer(Struct, frozen=True):
    """The answer of the filter to these numbers under these architecture tags (first and last of each)."""

    numbers: Range
    tags: Range
    rest: Rest


def answers(program: bytes, action: int = bpf.ALLOW) -> tuple[FilterAnswer, ...]:
    """Every span of tags and numbers with its answer. The spans are apart and cover all calls.

    `action` is the one whose arguments are asked for: what a list of grants allows, what a list of denials refuses. The
    other half would be as many conditions as all alternatives of one multiplied with each other.

    Raises:
        errors.ArtefactError: as `bpf.parse`; or the program does what the module's text says is refused.
    """
    return tuple(_Reader(bpf.parse(program), action).spans())


class _Reader:
    """One program, and what is known of its instructions so far."""

    def __init__(self, code: Sequence[bpf.Instruction], action: int) -> None:
        self._code = code
        self._action = action
        self._solved: dict[_State, Rest] = {}
        self._returns: dict[int, Rest] = {}

    def spans(self) -> Iterator[FilterAnswer]:
        """Follow tag and number as ranges."""
        # Instruction, word in the accumulator (none yet: -1), and the bounds of number and tag.
        waiting: list[tuple[int, int, Range, Range]] = [(0, -1, _EVERY, _EVERY)]
        while waiting:
            at, word, numbers, tags = waiting.pop()
            operation, if_true, if_false, constant = self._code[at]
            if operation == bpf.RETURN:
                yield FilterAnswer(numbers, tags, self._return(constant))
            elif operation == bpf.LOAD and constant not in _SPANNED:
                yield FilterAnswer(numbers, tags, self._rest((at, 0, 0)))
            elif operation == bpf.LOAD:
                waiting.append((at + 1, constant, numbers, tags))
            elif operation == bpf.JUMP:
                waiting.append((at + 1 + constant, word, numbers, tags))
            elif operation not in _BOUNDS or word == -1:
                raise _not_understood(at)
            else:
                # What lies between the two bounds passes the test; what lies below and above does not.
                rises, bounded = _BOUNDS[operation]
                first, last = constant + rises, constant if bounded else _TOP
                low, high = numbers if word == bpf.NUMBER else tags
                yes, no = at + 1 + if_true, at + 1 + if_false
                for start, end, to in (
                    (low, min(high, first - 1), no),
                    (max(low, first), min(high, last), yes),
                    (max(low, last + 1), high, no),
                ):
                    if start <= end:
                        cut = (start, end)
                        waiting.append((to, word, cut, tags) if word == bpf.NUMBER else (to, word, numbers, cut))

    def _return(self, action: int) -> Rest:
        if action not in self._returns:
            when = conditions.ALWAYS if action == self._action else conditions.NEVER
            self._returns[action] = Rest(frozenset({action}), when)
        return self._returns[action]

    def _rest(self, start: _State) -> Rest:
        """Return the answer from an instruction on, as a function of the arguments."""
        if start not in self._solved:
            reached: set[_State] = set()
            waiting = [start]
            while waiting:
                state = waiting.pop()
                if state not in reached and state not in self._solved:
                    reached.add(state)
                    waiting += self._next(state)
            # INVARIANT: every jump leads forward, so what an instruction leads to is read before it is.
            for state in sorted(reached, reverse=True):
                self._solved[state] = self._read(state)
        return self._solved[start]

    def _next(self, state: _State) -> tuple[_State, ...]:
        """Where an instruction can lead to: if it holds, if it does not."""
        at, word, mask = state
        operation, if_true, if_false, constant = self._code[at]
        if operation == bpf.RETURN:
            return ()
        if operation == bpf.LOAD:
            if constant < bpf.ARGUMENTS:
                raise _not_understood(at)
            return ((at + 1, constant, _TOP),)
        if operation == bpf.AND:
            return ((at + 1, word, mask & constant),)
        if operation == bpf.JUMP:
            return ((at + 1 + constant, word, mask),)
        return (at + 1 + if_true, word, mask), (at + 1 + if_false, word, mask)

    def _read(self, state: _State) -> Rest:
        at, word, mask = state
        operation, _, _, constant = self._code[at]
        if operation == bpf.RETURN:
            return self._return(constant)
        branches = [self._solved[following] for following in self._next(state)]
        if len(branches) == 1:
            return branches[0]
        # Two words an argument, the low one first (little endian): the bits of an argument are in order.
        place = (word - bpf.ARGUMENTS) * 8
        operator = bpf.TESTS[operation]
        when = conditions.compare(operator, constant, mask=mask, shift=place)
        then, otherwise = branches
        if when in (conditions.ALWAYS, conditions.NEVER):  # libseccomp writes tests of no bit at all
            return then if when else otherwise

        def unless() -> Condition:
            return conditions.compare(_NEGATED[operator], constant, mask=mask, shift=place)

        found = conditions.choose(when, unless, then.when, otherwise.when)
        return Rest(then.actions | otherwise.actions, found)


def _not_understood(at: int) -> errors.ArtefactError:
    return errors.ArtefactError(f"instruction {at} of the filter is not understood where it stands")

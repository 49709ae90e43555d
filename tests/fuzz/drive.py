"""Gives inputs to a target and judges what it makes of them."""

from __future__ import annotations

import re
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policy import errors
from tests.fuzz.source import JsonSource, Source

# Far above what an input of 20,000 bytes may take: what gets here is a loop or a blow-up.
INPUT_SECONDS = 10.0
_VARIES = re.compile(r"`[^`]*`|\d+|'[^']*'")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class Refused(Exception):
    """The target refused an input by an error that is no CovenantError; the text says why."""


@dataclass(frozen=True)
class Target:
    """A parser under test.

    ``attempt`` parses one input and, when it is accepted, asserts what then has to hold. It returns an answer: any
    text, equal for inputs that took the same path. What it may raise to refuse is ``refusals``; anything else is a
    find. ``share`` is its part of all inputs.
    """

    name: str
    attempt: Callable[[bytes], str]
    seeds: Callable[[], Sequence[bytes]]
    words: tuple[bytes, ...] = ()
    refusals: tuple[type[Exception], ...] = (errors.CovenantError,)
    share: int = 10
    json: bool = False


@dataclass
class Outcome:
    """The result of one run of a target. ``finds`` are failing inputs, each with its fault, the first of each kind."""

    name: str
    inputs: int = 0
    accepted: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    finds: dict[str, tuple[bytes, str]] = field(default_factory=dict)


class _TooSlow(BaseException):
    """Raised when an input takes longer than the limit."""


def _too_slow(*_: object) -> None:
    raise _TooSlow


def run(target: Target, inputs: int, seed: str) -> Outcome:
    """Give a target so many inputs."""
    made = JsonSource if target.json else Source
    source = made(target.seeds(), target.words, f"{seed}:{target.name}")
    outcome = Outcome(target.name)
    before = signal.signal(signal.SIGPROF, _too_slow)
    try:
        for given in target.seeds():
            _one(target, given, outcome)
        while outcome.inputs < inputs:
            data = source.draw()
            if _one(target, data, outcome):
                source.keep(data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return outcome


def _one(target: Target, data: bytes, outcome: Outcome) -> bool:
    """Judge one input; whether its answer is a new one."""
    outcome.inputs += 1
    signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
    try:
        answer = "accepted " + target.attempt(data)
        outcome.accepted += 1
    except target.refusals as refusal:
        answer = f"{type(refusal).__name__} {_VARIES.sub('_', str(refusal))[:120]}"
        problem = ill_formed(refusal)
        if problem:
            outcome.finds.setdefault(f"{type(refusal).__name__}: {problem}", (data, f"{problem}: {refusal!r}"))
    except (_TooSlow, RecursionError, MemoryError, Exception) as find:
        answer = _place(find)
        outcome.finds.setdefault(answer, (data, "".join(traceback.format_exception(find))))
    outcome.answers[answer] += 1
    return outcome.answers[answer] == 1


def _place(find: BaseException) -> str:
    """A find by its class and the last lines of ours that it passed."""
    frames = traceback.extract_tb(find.__traceback__)
    return f"{type(find).__name__} at " + " < ".join(f"{f.name}:{f.lineno}" for f in frames[-2:][::-1])


def ill_formed(refusal: Exception) -> str:
    """Return the fault in the words of a refusal, which are shown to users and contain parts of the input."""
    if not isinstance(refusal, errors.CovenantError):
        return ""
    for name, text in (("message", refusal.message), ("hint", refusal.hint), ("place", refusal.where)):
        if _HIDDEN.search(text):
            return f"the {name} holds a character that steers a terminal or shows nothing"
        if len(text) > 2000:
            return f"the {name} is {len(text)} characters long"
    return "" if refusal.message else "the message is empty"

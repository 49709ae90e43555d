"""Trace which functions of this project one run calls, each at its first call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from tests.kernel.world import ROOT, World

Call = tuple[str, str]
_PLACES = tuple(f"{ROOT}/{name}/" for name in ("covenant", "policy", "sandbox"))


def first_calls(world: World) -> list[Call]:
    """Run agents/hello twice, and return file and function of each first call of the second run."""
    path, calls = world.sign(world.copy("hello")), dict[Call, None]()
    assert world.run(path).error is None

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PLACES) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname] = None

    sys.setprofile(note)
    try:
        answer = world.run(path)
    finally:
        sys.setprofile(None)
    assert answer.error is None, answer.error
    return [*calls]


def first_visits(calls: Iterable[Call]) -> list[Call]:
    """Return each file with the function that is called first in it, in order."""
    found: dict[str, str] = {}
    for file, function in calls:
        found.setdefault(file, function)
    return [*found.items()]


def public_of_sandbox(calls: Iterable[Call]) -> list[Call]:
    """Return the calls of public functions of sandbox/."""
    return [
        (file, function)
        for file, function in calls
        if file.startswith("sandbox/") and not any(part.startswith("_") for part in function.split("."))
    ]


def returns(calls: Sequence[Call]) -> int:
    """Return how often the walk comes back to a file that it had left."""
    left, count, at = set[str](), 0, ""
    for file, _ in calls:
        if file != at:
            count += file in left
            left.add(file)
            at = file
    return count

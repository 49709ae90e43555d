"""The supervisor's end of a tool gate's questions: calls that are held for an operator, and those that may be made.

    tool gate ──▶ supervisor    a call that waits, by the number of its request (wire.QUESTION); later, that its client
                                is gone
    supervisor ──▶ tool gate    whether the call may be made (wire.VERDICT)

The gate asks before it writes `tool_called`. The row of a tool that is asked about is refused unless an operator let
one such call pass: the same tool, and arguments of the same digest.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from policy.grants.skills import SIDE_EFFECTS
from policy.leases import targets
from policy.manifest import text
from policy.manifest.tools import command
from policy.signing import strict_json
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.rows import GateRows, RowTerms
from sandbox.network.tools import wire

_AT_ONCE: Final = 64
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = {"number", "uri", "side_effect_class", "arguments_hash_hex", "arguments"}


class HoldTerms(Struct, frozen=True):
    """The desk of a run, the tools that are asked about, and the seconds that a call is held at most."""

    desk: LeaseDesk
    asked: frozenset[str]
    seconds: int


class ToolQuestions(GateRows):
    """Serves the questions of one gate."""

    def __init__(self, terms: HoldTerms) -> None:
        self._held = terms
        # The targets of the calls that wait, by number. A client that is gone uses no lease.
        self._open: dict[int, str] = {}
        self._gone: set[int] = set()
        self._passes: Counter[str] = Counter()
        refused = "asks what no honest gate does"
        super().__init__(RowTerms("tool", refused, wire.QUESTION_BYTES, _AT_ONCE, self._question))

    def passes(self, row: Mapping[str, Any]) -> bool:
        """Whether the call of a `tool_called` row may be made. It takes the pass of a call that was asked about."""
        if row["uri"] not in self._held.asked:
            return True
        target = targets.call(row["uri"], str(row["arguments_hash_hex"]))
        if not self._passes[target]:
            return False
        self._passes[target] -= 1
        return True

    def _question(self, message: bytes) -> bool:
        try:
            found = strict_json.loads(message, max_bytes=wire.QUESTION_BYTES)
        except strict_json.MalformedJsonError:
            return False
        if not isinstance(found, dict) or type(found.get("number")) is not int:
            return False
        number = found["number"]
        if found.keys() == {"number", "gone"}:
            # The answer and this message may cross.
            self._gone |= {number} & self._open.keys()
            return found["gone"] is True
        if found.keys() != _KEYS or not all(isinstance(found[key], str) for key in _KEYS - {"number"}):
            return False
        if not 0 <= number <= wire.LAST_NUMBER or number in self._open or len(self._open) >= wire.HELD_CALLS:
            return False
        # INVARIANT: no gate asks for a command, whose arguments it never sees: a view of others would be granted.
        if command.bound(found["uri"]) is not None:
            return False
        if found["uri"] not in self._held.asked or found["side_effect_class"] not in SIDE_EFFECTS:
            return False
        if not _DIGEST.fullmatch(found["arguments_hash_hex"]):
            return False
        self._ask(number, found)
        return True

    def _ask(self, number: int, found: Mapping[str, str]) -> None:
        target = self._open[number] = targets.call(found["uri"], found["arguments_hash_hex"])

        def then(granted: bool) -> None:
            self._answer(number, target, granted=granted)

        self._held.desk.ask(
            "tool",
            target,
            self._held.seconds,
            then,
            side_effect=found["side_effect_class"],
            # The end again: escapes of a gate that is not honest could make it long.
            arguments=text.visible(found["arguments"], targets.SHOWN_CHARACTERS)[: targets.SHOWN_CHARACTERS],
        )

    def _answer(self, number: int, target: str, *, granted: bool) -> None:
        """Answer a question. Of several calls that waited for one lease of one use, the first is made."""
        del self._open[number]
        if number in self._gone:
            self._gone.remove(number)
            granted = False
        elif granted and self._held.desk.seconds("tool", target) is None:
            granted = False
        elif granted:
            self._held.desk.used("tool", target)
            self._passes[target] += 1
        with contextlib.suppress(OSError):  # the gate has ended, which the end of its lines tells
            self.own.send(wire.VERDICT.pack(number, granted))

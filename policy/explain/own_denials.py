"""The denials of a run as lines of JSON that its agent can read: /run/covenant/denials.jsonl of its root (ADR 0075).

The agent learns of each refusal what ``covenant denials`` says of it: the meaning, and the lines of agent.toml that
would allow it. It does not learn what only the operator may know, such as whether a secret is in the vault.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from policy import denials, errors
from policy.denials import Denial, Row
from policy.why import denied
from policy.why.ask import Sight

# The most bytes of the file, and the most denials that are explained by the artefacts: each takes about a millisecond.
MAX_BYTES: Final = 262_144
MAX_EXPLAINED: Final = 200
# The last line of a file that is full.
END: Final = b'{"end": "the file is full: covenant denials has the rest"}\n'
# What an agent is told in the place of a cause that would tell it of the vault or of the operator's own network.
REFUSED: Final = "refused"
_OPERATORS: Final = frozenset({("dns", "rebinding"), ("dns", "upstream")})


@dataclass(slots=True)
class OwnDenials:
    """The lines of one run, of at most ``MAX_BYTES`` together. ``sight`` is asked for once, at the first denial.

    An explanation that fails leaves the denial itself.
    """

    sight: Callable[[], Sight]
    _seen: Sight | None = None
    _explained: int = 0
    _left: int = MAX_BYTES - len(END)
    _full: bool = False

    def line(self, row: Row, *, at_ms: int) -> bytes:
        """Return the line of a row, END once the file is full, and nothing after that. ``at_ms`` is Unix time."""
        if self._full:
            return b""
        raw = json.dumps({**self._words(row.denial), "count": row.count, "at_ms": at_ms}).encode() + b"\n"
        if len(raw) > self._left:
            self._full = True
            return END
        self._left -= len(raw)
        return raw

    def _words(self, denial: Denial) -> dict[str, Any]:
        if _is_operators(denial):
            meaning = "it was refused; the operator sees why"
            return {"layer": denial.layer, "target": denial.target, "code": REFUSED, "meaning": meaning, "add": []}
        known = denied.words(denial)
        out = {"id": known.pop("denial"), **known, "meaning": denied.meaning(denial), "add": []}
        if self._explained >= MAX_EXPLAINED:
            return out
        self._explained += 1
        try:
            if self._seen is None:
                self._seen = self.sight()
            found = denied.explain(denial, self._seen)
        except errors.CovenantError:
            return out
        never = "" if found.answer is None else found.answer.never
        bounds = {} if found.answer is None else dict(found.answer.bounds)
        return {**out, "add": list(found.add), "never": never or None, "bounds": bounds, "note": found.note or None}


def _is_operators(denial: Denial) -> bool:
    """Whether the cause is the operator's alone. A refused secret has one answer (docs/credentials.md)."""
    if denial.layer == "credential":
        return denial.code != denials.NOT_GRANTED
    return (denial.layer, denial.code) in _OPERATORS

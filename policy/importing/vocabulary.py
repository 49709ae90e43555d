"""The result of an import: the text of a manifest, and what of the source is not in it.

One rule decides everything: the result never grants more than the source. Only an allowance that the source writes
becomes a grant; a permission that it gives by silence does not (docs/adr/0101).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field

from policy import errors
from policy.manifest import fields, text

MAX_BYTES: Final = 1024 * 1024
LOSSES: Final = 2_000


class LossKind(StrEnum):
    """The three things that can become of a word of the source that is not in the manifest as it was."""

    NOT_EXPRESSIBLE = "not_expressible"
    NARROWER = "narrower"
    REFUSED = "refused"


class ImportLoss(Struct, frozen=True):
    """One word of the source: where it stands, what became of it, and the line of agent.toml that would grant it."""

    kind: LossKind
    place: str
    message: str
    line: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a document."""
        return {"kind": str(self.kind), "place": self.place, "message": self.message, "line": self.line or None}


class Imported(Struct, frozen=True):
    """The text of agent.toml, unsigned, and the losses in the order of the source."""

    manifest_text: str
    losses: tuple[ImportLoss, ...]


class Context(Struct, frozen=True):
    """Facts that the caller knows and the source does not say.

    ``base`` is the directory that relative paths of the source begin at, ``home`` the one of ``~``. ``runtime`` is that
    of ``entry``.
    """

    agent_id: str = "imported"
    entry: str = ""
    base: str = ""
    home: str = ""
    runtime: str = "command"


class Draft(Struct):
    """A manifest while it is made. Empty means that nothing is granted."""

    context: Context
    entry: str = "main"
    args: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    write: list[str] = field(default_factory=list)
    scratch: bool = False
    workspace: list[str] = field(default_factory=list)
    mask: list[str] = field(default_factory=list)
    protect: list[str] = field(default_factory=list)
    mode: str = "off"
    network: list[tuple[str, str, str]] = field(default_factory=list)
    fetch: list[str] = field(default_factory=list)
    executables: list[str] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    denied_calls: list[str] = field(default_factory=list)
    skills: list[str] = field(default_factory=list)
    side_effects: list[str] = field(default_factory=list)
    losses: list[ImportLoss] = field(default_factory=list)

    def lost(self, kind: LossKind, place: str, message: str, line: str = "") -> None:
        """Add a loss, once. Of a source with more than 2,000 the rest is one loss."""
        one = ImportLoss(kind, place, message, line)
        if one in self.losses:
            return
        if len(self.losses) == LOSSES:
            self.losses.append(
                ImportLoss(LossKind.NOT_EXPRESSIBLE, "", f"more than {LOSSES} losses; the rest is not shown")
            )
        elif len(self.losses) < LOSSES:
            self.losses.append(one)

    def narrower(self, place: str, message: str, line: str = "") -> None:
        """Add the loss of a permission that the source had, whole or in part."""
        self.lost(LossKind.NARROWER, place, message, line)

    def inexpressible(self, place: str, message: str, line: str = "") -> None:
        """Add the loss of a word for which a manifest has none."""
        self.lost(LossKind.NOT_EXPRESSIBLE, place, message, line)

    def refused(self, place: str, message: str, line: str = "") -> None:
        """Add the loss of a permission that no manifest is given."""
        self.lost(LossKind.REFUSED, place, message, line)


def malformed(message: str, *, where: str, hint: str) -> errors.ImportSourceError:
    """Return the error of a source that cannot be read as its format."""
    return errors.ImportSourceError(message, where=where, hint=hint)


def shown(value: object) -> str:
    """A value of the source in backticks: hidden characters are written out, and it is cut short."""
    return text.quote(value)


def bounded(draft: Draft, found: list[str], key: str) -> list[str]:
    """Return the first 256 items, sorted and once each: a list of a manifest holds no more."""
    items = sorted(set(found))
    for one in items[fields.LIST_ITEMS :]:
        draft.narrower(key, f"{shown(one)} is left out: a list has at most {fields.LIST_ITEMS} items")
    return items[: fields.LIST_ITEMS]

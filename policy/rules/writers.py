"""One writer at a time for each written file system (ADR 0079).

gVisor keeps the file locks of a sandbox to itself: two runs that write one database both get its lock, and lose commits
of each other. A granted path for writing is a file system of its own, so its device identifies it under every name.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from policy import errors
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest import text
from policy.manifest.permissions import VolumeGrant


class WrittenPlace(Struct, frozen=True):
    """A written file system: its key, its name for people, and whether other runs may write it at the same time."""

    key: str
    name: str
    shared: bool = False


class Writer(Struct, frozen=True):
    """A live run that writes. ``run_id`` is empty where the refusal may not name it; ``left`` says that its process was
    killed, and its sandbox is not cleared away yet."""

    run_id: str
    places: tuple[WrittenPlace, ...]
    left: bool = False


def of(effective: Effective, host: HostFacts) -> tuple[WrittenPlace, ...]:
    """Return the file systems that a run with these grants writes."""
    found = effective.filesystem
    volumes = (VolumeGrant.of(one).name for one in found.volumes.listing())
    return (
        *(
            WrittenPlace(f"device {host.granted[path].device}", path, found.shared)
            for path in found.write
            if path in host.granted
        ),
        *(WrittenPlace(f"volume {name}", f"volume:{name}", found.shared) for name in volumes),
    )


def encode(places: Iterable[WrittenPlace]) -> str:
    """Return the places as a field of a label. It is empty for none."""
    listed = list(places)
    return msgspec.json.encode(listed).decode() if listed else ""


def decode(field: str) -> tuple[WrittenPlace, ...]:
    """Return the places of a label's field.

    Raises:
        ValueError: it is none that ``encode`` returns.
    """
    return msgspec.json.decode(field, type=tuple[WrittenPlace, ...]) if field else ()


def check(mine: Iterable[WrittenPlace], others: Iterable[Writer], where: str = "") -> None:
    """Refuse a run that would write what another live run writes.

    Raises:
        errors.PathInUseError: it would; the error names the path, and the run where it may.
    """
    wanted = {one.key: one for one in mine}
    for other in others:
        for held in other.places:
            one = wanted.get(held.key)
            if one is not None and not (one.shared and held.shared):
                raise _refusal(one, held, other, where)


def _refusal(one: WrittenPlace, held: WrittenPlace, other: Writer, where: str) -> errors.PathInUseError:
    name = text.quote(one.name)
    who = f"run `{other.run_id}`" if other.run_id else "another run"
    under = "" if held.name == one.name or not other.run_id else f", under the name {text.quote(held.name)}"
    if other.left:
        message, hint = f"{who}, which wrote {name}, was killed and is not cleared away yet", "run it again"
    elif one.shared:
        message, hint = f"{name} is shared, and {who} writes it without `shared`", "wait until that run has ended"
    else:
        message = f"{who} writes {name} now{under}"
        hint = "wait until it has ended; shared = true below [permissions.filesystem] of both lets two write at once"
    return errors.PathInUseError(message, hint=hint, where=where)

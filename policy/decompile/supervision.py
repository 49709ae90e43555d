"""supervision.json and credentials.json read back: what the supervisor and the vault hold, and no kernel does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policy.decompile import documents
from policy.decompile.documents import OPTIONAL_INT, Files, closed, fixed, refuse
from policy.grants.credentials import Credentials
from policy.grants.identity import Identity
from policy.grants.lifetime import ON_EXPIRY, Lifetime
from policy.grants.sets.domain import ANY, NameSet
from policy.grants.skills import SIDE_EFFECTS, Skills
from policy.grants.spawning import ON_PARENT_EXIT, Spawning

SUPERVISION = "supervision.json"
CREDENTIALS = "credentials.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Held:
    """The domains that the supervisor holds, and the ceilings of a task in milliseconds."""

    identity: Identity
    spawning: Spawning
    lifetime: Lifetime
    skills: Skills
    wall_ms: int | None
    cpu_time_ms: int | None


def read(files: Files) -> Held:
    """supervision.json.

    Raises:
        errors.ArtefactError: it is not exactly of its form.
    """
    whole = closed(
        documents.load(files, SUPERVISION),
        SUPERVISION,
        {"lifetime": dict, "roles": list, "skills": dict, "spawn": dict, "task": dict, "version": int},
    )
    fixed(whole["version"], f"{SUPERVISION}:version", VERSION)
    where = f"{SUPERVISION}:skills"
    skills = closed(whole["skills"], where, {"allow": list, "side_effects": list})
    effects = _set(skills["side_effects"], where)
    if not effects.names <= set(SIDE_EFFECTS):
        raise refuse(where, f"{documents.shown(effects.listing())} holds a class that does not exist")
    where = f"{SUPERVISION}:task"
    task = closed(whole["task"], where, {"cpu_time_ms": OPTIONAL_INT, "wall_ms": OPTIONAL_INT})
    return Held(
        Identity(_set(whole["roles"], f"{SUPERVISION}:roles")),
        _spawning(whole["spawn"]),
        _lifetime(whole["lifetime"]),
        Skills(_set(skills["allow"], f"{SUPERVISION}:skills"), effects),
        _ceiling(task["wall_ms"], where),
        _ceiling(task["cpu_time_ms"], where),
    )


def credentials(files: Files) -> Credentials:
    """credentials.json: the names that the vault gives to the run.

    Raises:
        errors.ArtefactError: it is not exactly of its form.
    """
    whole = closed(documents.load(files, CREDENTIALS), CREDENTIALS, {"names": list, "version": int})
    fixed(whole["version"], f"{CREDENTIALS}:version", VERSION)
    found = _set(whole["names"], f"{CREDENTIALS}:names")
    return Credentials(found.names, found.any)


def _set(value: object, where: str) -> NameSet:
    found = documents.names(value, where)
    if ANY in found and found != [ANY]:
        raise refuse(where, "`*` stands beside names, which it holds already")
    return NameSet.top() if found == [ANY] else NameSet.of(found)


def _ceiling(value: int | None, where: str) -> int | None:
    return None if value is None else documents.whole(value, where)


def _spawning(value: dict[str, Any]) -> Spawning:
    where = f"{SUPERVISION}:spawn"
    shape: documents.Shape = {"max_depth": OPTIONAL_INT, "max_descendants": OPTIONAL_INT, "on_parent_exit": str}
    spawn = closed(value, where, shape)
    fate = documents.one_of(spawn["on_parent_exit"], where, ON_PARENT_EXIT)
    depth, number = _ceiling(spawn["max_depth"], where), _ceiling(spawn["max_descendants"], where)
    if (depth == 0) != (number == 0):
        raise refuse(where, "a depth without descendants, or descendants without a depth")
    return Spawning(depth, number, ON_PARENT_EXIT[ON_PARENT_EXIT.index(fate)])


def _lifetime(value: dict[str, Any]) -> Lifetime:
    where = f"{SUPERVISION}:lifetime"
    life = closed(value, where, {"on_expiry": str, "ttl_seconds": OPTIONAL_INT})
    fate = documents.one_of(life["on_expiry"], where, ON_EXPIRY)
    return Lifetime(_ceiling(life["ttl_seconds"], where), ON_EXPIRY[ON_EXPIRY.index(fate)])

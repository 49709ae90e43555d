"""supervision.json and credentials.json read back: what the supervisor and the vault hold, and no kernel does."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from policy import errors
from policy.decompile import documents
from policy.decompile.documents import OPTIONAL_INT, Files, closed, fixed, refuse
from policy.grants import restore, skill_rules
from policy.grants.credentials import CredentialSet
from policy.grants.identity import Identity
from policy.grants.lifetime import ON_EXPIRY, LifetimeGrant
from policy.grants.sets.domain import ANY, NameSet
from policy.grants.skills import LIMITS, SIDE_EFFECTS, SkillSet
from policy.grants.spawning import ON_PARENT_EXIT, MayGrant, Spawning

SUPERVISION = "supervision.json"
CREDENTIALS = "credentials.json"
VERSION = 1


_INTENTS = {"text": ("argument", "stdin"), "stdio": ("none",), "terminal": ("none",)}

_LATER_KEYS: Final = (("rules", list), ("limits", dict), ("asked", list))


class Supervision(Struct, frozen=True):
    """The domains that the supervisor holds, and the ceilings of a task in milliseconds."""

    identity: Identity
    spawning: Spawning
    lifetime: LifetimeGrant
    skills: SkillSet
    wall_ms: int | None
    cpu_time_ms: int | None
    contract: str
    intent: str
    may_grant: MayGrant


def read(files: Files) -> Supervision:
    """supervision.json.

    Raises:
        errors.ArtefactError: it is not exactly of its form.
    """
    document = documents.load(files, SUPERVISION)
    shape = {"lifetime": dict, "roles": list, "skills": dict, "spawn": dict, "task": dict, "version": int}
    shape |= {"process": dict} if type(document) is dict and "process" in document else {}
    whole = closed(document, SUPERVISION, shape)
    contract, intent = _process(whole["process"]) if "process" in whole else ("line", "stdin")
    fixed(whole["version"], f"{SUPERVISION}:version", VERSION)
    where = f"{SUPERVISION}:skills"
    skills = read_skills(whole["skills"], where)
    where = f"{SUPERVISION}:task"
    task = closed(whole["task"], where, {"cpu_time_ms": OPTIONAL_INT, "wall_ms": OPTIONAL_INT})
    return Supervision(
        Identity(_set(whole["roles"], f"{SUPERVISION}:roles")),
        _spawning(whole["spawn"]),
        _lifetime(whole["lifetime"]),
        skills,
        _ceiling(task["wall_ms"], where),
        _ceiling(task["cpu_time_ms"], where),
        contract,
        intent,
        _may_grant(whole["spawn"]),
    )


def read_skills(value: dict[str, Any], where: str) -> SkillSet:
    """Tools, classes, rules of arguments and limits of calls.

    The form of a clause is that of the artefact; what it means is in ``policy.grants.skill_rules``.
    """
    shape: documents.Shape = {"allow": list, "side_effects": list}
    shape = {**shape, **{name: kind for name, kind in _LATER_KEYS if name in value}}
    skills = closed(value, where, shape)
    effects = _set(skills["side_effects"], where)
    if not effects.names <= set(SIDE_EFFECTS):
        raise refuse(where, f"{documents.shown(effects.listing())} holds a class that does not exist")
    allow = _set(skills["allow"], where)
    limits: dict[str, int | None] = dict.fromkeys(LIMITS, 0)
    if "limits" in skills:
        # A budget of calls that is not written is none (SkillSet.canonical).
        found = skills["limits"]
        names = [name for name in LIMITS if name != "calls" or (type(found) is dict and "calls" in found)]
        written = closed(found, where, dict.fromkeys(names, OPTIONAL_INT))
        limits = {"calls": None, **{name: _ceiling(limit, where) for name, limit in written.items()}}
        if "calls" in written and limits["calls"] is None:
            raise refuse(where, "a budget of calls that is none is written")
        if not any(limit != 0 for limit in limits.values()):
            raise refuse(where, "limits that allow nothing are written")
    try:
        rules = skill_rules.restore(skills["rules"]) if "rules" in skills else ()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise refuse(where, "a rule of arguments is of no such form") from e
    asked = _set(skills["asked"], where).listing() if "asked" in skills else []
    found = SkillSet(allow, effects, rules, asked=tuple(asked), **limits)
    if found.rules != rules:
        raise refuse(where, "a rule is about a tool that is not granted")
    if list(found.asked) != asked or ("asked" in skills and not asked):
        raise refuse(where, "a tool is asked about and not granted")
    return found


def _process(value: dict[str, Any]) -> tuple[str, str]:
    """The contract and the way of the intent. The contract line stands in no document."""
    where = f"{SUPERVISION}:process"
    process = closed(value, where, {"contract": str, "intent": str})
    documents.one_of(process["contract"], where, tuple(_INTENTS))
    documents.one_of(process["intent"], where, _INTENTS[process["contract"]])
    return process["contract"], process["intent"]


def credentials(files: Files) -> CredentialSet:
    """credentials.json: the names that the vault gives to the run.

    Raises:
        errors.ArtefactError: it is not exactly of its form.
    """
    whole = closed(documents.load(files, CREDENTIALS), CREDENTIALS, {"names": list, "version": int})
    fixed(whole["version"], f"{CREDENTIALS}:version", VERSION)
    found = _set(whole["names"], f"{CREDENTIALS}:names")
    return CredentialSet(found.names, found.any)


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
    shape = {**shape, "may_grant": dict} if "may_grant" in value else shape
    spawn = closed(value, where, shape)
    fate = documents.one_of(spawn["on_parent_exit"], where, ON_PARENT_EXIT)
    depth, number = _ceiling(spawn["max_depth"], where), _ceiling(spawn["max_descendants"], where)
    if (depth == 0) != (number == 0):
        raise refuse(where, "a depth without descendants, or descendants without a depth")
    return Spawning(depth, number, ON_PARENT_EXIT[ON_PARENT_EXIT.index(fate)])


def _may_grant(spawn: dict[str, Any]) -> MayGrant:
    """The rights for children, which stand in the document where there are any."""
    if "may_grant" not in spawn:
        return MayGrant.bottom()
    try:
        return restore.may_grant(spawn["may_grant"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, errors.ManifestError) as e:
        raise refuse(f"{SUPERVISION}:spawn/may_grant", "it is no canonical form of rights") from e


def _lifetime(value: dict[str, Any]) -> LifetimeGrant:
    where = f"{SUPERVISION}:lifetime"
    life = closed(value, where, {"on_expiry": str, "ttl_seconds": OPTIONAL_INT})
    fate = documents.one_of(life["on_expiry"], where, ON_EXPIRY)
    return LifetimeGrant(_ceiling(life["ttl_seconds"], where), ON_EXPIRY[ON_EXPIRY.index(fate)])

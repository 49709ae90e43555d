"""supervision.json: what the supervisor holds by its own acts, since no mechanism of the kernel does."""

from __future__ import annotations

from typing import Any

from policy.compile.artefacts import Cause, Provenance
from policy.compile.causes import Origins
from policy.grants.effective import Effective
from policy.manifest.process import INTENT

# Place in the document -> domain and name of the value, and the key of the manifest.
_VALUES = {
    "spawn/max_depth": ("spawning", "max_depth", "spawn.max_depth"),
    "spawn/max_descendants": ("spawning", "max_descendants", "spawn.max_descendants"),
    "spawn/on_parent_exit": ("spawning", "on_parent_exit", "spawn.on_parent_exit"),
    "lifetime/on_expiry": ("lifetime", "on_expiry", "lifetime.on_expiry"),
    "task/wall_ms": ("resources", "cpu_ms_per_task", "resources.cpu_ms_per_task"),
    "task/cpu_time_ms": ("resources", "cpu_time_ms", "resources.cpu_time_ms"),
}


def compile(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    """supervision.json.

    Raises:
        errors.UnexplainedError: the manifest does not list a tool or a class of side effects, ``*`` among them.
    """
    document: dict[str, Any] = {"version": 1, "roles": effective.identity.roles.listing()}
    provenance.add("supervision.json:roles", _role(effective, origins))
    for place, (domain, name, key) in _VALUES.items():
        section, _, field = place.partition("/")
        document.setdefault(section, {})[field] = getattr(getattr(effective, domain), name)
        provenance.add(f"supervision.json:{place}", origins.value(domain, name, key))
    if effective.may_grant:
        document["spawn"]["may_grant"] = effective.may_grant.canonical()
        provenance.add("supervision.json:spawn/may_grant", _rights(effective, origins))
    document["lifetime"]["ttl_seconds"] = effective.lifetime.ttl_seconds
    unlimited = origins.manifest.lifetime.unlimited
    key = "lifetime.unlimited" if unlimited else "lifetime.ttl_seconds"
    provenance.add("supervision.json:lifetime/ttl_seconds", origins.value("lifetime", "ttl_seconds", key))
    if origins.manifest.process.contract != "line":
        document["process"] = {"contract": origins.manifest.process.contract, "intent": _intent(origins)}
        provenance.add("supervision.json:process/contract", origins.of("process.contract"))
        provenance.add("supervision.json:process/intent", origins.of("process.contract"))
    document["skills"] = {}
    for name in ("allow", "side_effects"):
        listed = getattr(effective.skills, name).listing()
        document["skills"][name] = listed
        written = getattr(origins.manifest.permissions.skills, name)
        for one in listed:
            cause = _command(one, origins) or origins.item(f"permissions.skills.{name}", written, one)
            provenance.add(f"supervision.json:skills/{name}/{one}", cause)
    document["skills"] |= _calls(effective, origins, provenance)
    document["skills"] |= _asked(effective, origins, provenance)
    return document


def _command(uri: str, origins: Origins) -> Cause | None:
    """The cause for what stands for a command; None for every other tool."""
    for index, one in enumerate(origins.manifest.tools.command):
        if one.uri == uri:
            return Cause("manifest", f"tools.command[{index}]", one.name)
    return None


def _rights(effective: Effective, origins: Origins) -> Cause:
    """The cause for the rights that children may be given."""
    if not origins.manifest.spawn.may_grant:
        raise origins.uncovered("spawn.may_grant", effective.may_grant.describe()[0])
    return origins.value_of_domain("may_grant", "spawn.may_grant")


def _calls(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    """The rules of arguments and the limits of calls, where there are any."""
    held = effective.skills.canonical()
    written = origins.manifest.permissions.skills.rule
    for index, one in enumerate(effective.skills.rules):
        at = next((i for i, r in enumerate(written) if (r.tool, r.argument) == (one.tool, one.argument)), None)
        said = f"{one.tool} {one}"
        place = f"supervision.json:skills/rules/{index}"
        if (command := _command(one.tool, origins)) is not None:
            provenance.add(place, Cause(command.kind, command.key, said))
        elif at is None:
            # A parent's rule narrows a tool that the manifest asked for without one.
            tools = origins.manifest.permissions.skills.allow
            cause = origins.item("permissions.skills.allow", tools, one.tool)
            provenance.add(place, Cause(cause.kind, cause.key, said, "asked for any argument"))
        else:
            provenance.add(place, Cause("manifest", f"permissions.skills.rule[{at}]", said))
    for name in held.get("limits", {}):
        cause = origins.value("skills", name, f"permissions.skills.{name}")
        provenance.add(f"supervision.json:skills/limits/{name}", cause)
    return {name: held[name] for name in ("rules", "limits") if name in held}


def _asked(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    """The tools of which an operator is asked about each call, where there are any."""
    written = origins.manifest.permissions.skills
    for uri in effective.skills.asked:
        cause = _command(uri, origins)
        if cause is None and uri in written.ask:
            cause = Cause("manifest", f"permissions.skills.ask[{written.ask.index(uri)}]", uri)
        elif cause is None:
            # A parent's question narrows a tool that the manifest grants without one.
            item = origins.item("permissions.skills.allow", written.allow, uri)
            cause = Cause(item.kind, item.key, uri, "asked for without a question")
        provenance.add(f"supervision.json:skills/asked/{uri}", cause)
    return {"asked": list(effective.skills.asked)} if effective.skills.asked else {}


def _intent(origins: Origins) -> str:
    """How the intent reaches the agent: by stdin, in an argument, or not at all."""
    process = origins.manifest.process
    if process.contract != "text":
        return "none"
    return "argument" if any(INTENT in one for one in process.args) else "stdin"


def _role(effective: Effective, origins: Origins) -> Cause:
    narrowed = origins.requested is not None and origins.requested.identity != effective.identity
    parent = "asked for more roles" if narrowed else ""
    if origins.manifest.wrote("agent.role"):
        return Cause("manifest", "agent.role", parent=parent)
    return Cause("default", "agent.role", "absent: under no role's ceiling", parent)

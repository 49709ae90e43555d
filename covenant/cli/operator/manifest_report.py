"""Reports about a manifest on the command line: its grants, the defaults that apply, and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.manifest.agent import Manifest
    from policy.manifest.permissions import NetworkEntry
    from policy.package import Package
    from policy.signing.statement import Statement


def notes(read: Package, parsed: Manifest) -> list[str]:
    """Return notes about valid settings that deserve attention."""
    from policy import data
    from policy import package as packages
    from policy.manifest import names, parse
    from policy.manifest.tools import checks
    from policy.why import hints
    from sandbox.rootfs import closure

    notes = [f"unknown section [{name}] means nothing here" for name in parsed.unknown_sections]
    notes += [f"`{path}` was left by a program; sign refuses it" for path in packages.droppings(read.digests)]
    try:
        parse.require_network(parsed)
    except errors.ManifestError as e:
        notes.append(f"{e.message}; sign refuses that")
    if parsed.lifetime.unlimited:
        notes.append("the lifetime is unlimited; sign wants --approve-unlimited")
    # No rule refuses the role of an agent of another program; that of any other is one of the refusals.
    if parsed.agent.runtime == "hermes" and (role := names.unknown_role(parsed, data.roles().by_name)):
        notes.append(role)
    notes += checks.notes(read, parsed)
    notes += hints.of(read.files, parsed)
    if parsed.agent.runtime in closure.RUNTIMES:
        notes += [f"`{name}` cannot be loaded: {reason}" for name, reason in closure.unloadable(read.files)]
    return notes


def verdict(refusals: Sequence[errors.CovenantError], host: str | None) -> str:
    """Return what ``manifest check`` found, as a phrase: a well-formed manifest may still be refused by `run`."""
    if not refusals:
        return "the manifest is acceptable"
    place = "this host" if host is None else "that host"
    return f"well formed; run refuses it on {place}: {len(refusals)} reason{'s'[: len(refusals) - 1]}"


def grants(parsed: Manifest) -> dict[str, list[str]]:
    """Return the parsed grants of the manifest by domain: its raw text may mislead, in a comment or a string.

    System calls are listed as the name of the profile, and each additional call by its own.
    """
    from policy import data
    from policy.rules import nine

    requested = nine.requested(parsed, roles=data.roles())
    role = f"role {parsed.agent.role}" if parsed.agent.role else "no role, so the ceiling of none"
    calls = requested.syscalls
    named = [f"profile {calls.profile}"] if calls.profile else []
    named += [f"call {name}" for name in sorted(calls.names - calls.profile_names)]
    named += [f"not call {name}" for name in sorted(calls.profile_names - calls.names)]
    backend = parsed.sandbox.backend
    sandboxed = "" if backend == "linux-gvisor" else ", which is no sandbox: `run` says what it does not enforce"
    # One line for each table entry: as a set, a few overlapping blocks would be thousands of lines.
    hosts = [_destination(entry) for entry in parsed.permissions.network] or list(requested.network.describe())
    others = replace(requested, network=type(requested.network).bottom())
    lines = {name: list(rows) for name, rows in others.describe().items()} | ({"network": hosts} if hosts else {})
    return {"backend": [backend + sandboxed], **lines, "identity": [role], "syscalls": named}


def _destination(entry: NetworkEntry) -> str:
    ports = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in entry.ports)
    return f"connect {entry.host} {entry.protocol} {ports}"


def say_grants(parsed: Manifest) -> None:
    """Print the manifest's grants."""
    common.say("grants:")
    for domain, lines in grants(parsed).items():
        for line in lines:
            common.say(common.visible(f"  {domain}: {line}"))


def defaults(parsed: Manifest) -> list[dict[str, Any]]:
    """Return the defaults that apply, with reasons."""
    from policy.manifest import parse

    return [{"key": key, "value": value, "reason": reason} for key, value, reason in parse.defaults_applied(parsed)]


def say_defaults(parsed: Manifest) -> None:
    """Print the defaults that apply, and the tolerated sections."""
    applied = defaults(parsed)
    if applied:
        common.say("defaults that apply:")
    for row in applied:
        value = "none" if row["value"] is None else row["value"]
        common.say(f"  {row['key']} = {common.visible(str(value))}  ({row['reason']})")
    say_unknown(parsed)


def say_unknown(parsed: Manifest) -> None:
    """Print the sections that have no meaning here."""
    for name in parsed.unknown_sections:
        common.say(f"unknown section, tolerated and without effect: [{common.visible(name)}]", err=True)


def statement(signed: Statement) -> dict[str, Any]:
    """Return a signed statement as JSON."""
    return signed.model_dump(mode="json", exclude={"subjects"}) | {"subjects": dict(signed.subjects)}


def audience(signed: Statement) -> str:
    """Return the host that may run it, as a phrase."""
    return f"for host {signed.audience}" if signed.audience else "for any host"

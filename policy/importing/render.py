"""Write a draft as agent.toml: every key that grants something, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from policy import errors
from policy.importing.vocabulary import Draft, Imported, bounded
from policy.manifest import fields, parse, text

_DISK_MB: Final = 100


def imported(draft: Draft, source: str) -> Imported:
    """Return the manifest's text and the losses. ``source`` is the name of the format.

    Raises:
        errors.ImportSourceError: the parser of manifests does not take the result; the error says why.
    """
    draft.narrower("", f"a permission that {source} gives without writing it is not granted (docs/import.md)")
    rendered = "\n".join(_lines(draft, source)) + "\n"
    try:
        parse.parse(rendered.encode())
    except errors.ManifestError as e:
        message = f"the source gives a manifest that is refused: {e.message}"
        raise errors.ImportSourceError(message, where=e.where, hint=e.hint or "change the source there") from None
    return Imported(rendered, tuple(draft.losses))


def _lines(draft: Draft, source: str) -> Iterator[str]:
    context = draft.context
    yield f"# Imported from a configuration of {source}, and not signed. The report of the import names what it lacks."
    yield "[agent]"
    yield f"id = {text.toml(context.agent_id)}"
    yield f"name = {text.toml(context.agent_id)}"
    yield 'version = "0.1.0"'
    yield f"runtime = {text.toml(context.runtime)}"
    yield f"entry = {text.toml(context.entry or draft.entry)}"
    yield from _resources(draft)
    yield ""
    yield "[sandbox]"
    yield "required = true"
    yield 'backend = "linux-gvisor"'
    yield f'filesystem = "{_filesystem(draft)}"'
    if draft.args and not context.entry:
        yield ""
        yield "[process]"
        yield f"args = {_list(draft.args)}"
    yield from _workspace(draft)
    yield from _permissions(draft)
    if draft.fetch:
        yield ""
        yield "[services.fetch]"
        yield f"hosts = {_list(bounded(draft, draft.fetch, 'services.fetch.hosts'))}"


def _filesystem(draft: Draft) -> str:
    if draft.write:
        return "host"
    return "ephemeral" if draft.scratch or draft.workspace else "read-only-package"


def _resources(draft: Draft) -> Iterator[str]:
    limits = dict(draft.limits)
    if _filesystem(draft) != "read-only-package":
        limits.setdefault("disk_mb", _DISK_MB)
    yield ""
    yield "[resources]"
    for key in sorted(limits):
        yield f"{key} = {limits[key]}"
    yield f'network = "{_mode(draft)}"'


def _mode(draft: Draft) -> str:
    if not draft.network:
        return draft.mode
    plain = all(ports == "[443]" and protocol == "tls" for _, ports, protocol in draft.network)
    return "outbound-https-only" if plain else "full"


def _workspace(draft: Draft) -> Iterator[str]:
    if draft.workspace:
        yield ""
        yield "[workspace]"
        yield 'mode = "overlay"'
        yield f"from = {_list(bounded(draft, draft.workspace, 'workspace.from'))}"
        for key, patterns in (("mask", draft.mask), ("protect", draft.protect)):
            if patterns:
                yield f"{key} = {_list(bounded(draft, patterns, f'workspace.{key}'))}"


def _permissions(draft: Draft) -> Iterator[str]:
    if draft.read or draft.write:
        yield ""
        yield "[permissions.filesystem]"
        for key, paths in (("read", draft.read), ("write", draft.write)):
            if paths:
                yield f"{key} = {_list(bounded(draft, paths, f'permissions.filesystem.{key}'))}"
    seen = sorted(set(draft.network))
    for host, _, _ in seen[fields.LIST_ITEMS :]:
        draft.narrower("permissions.network", f"{text.quote(host)} is left out: at most {fields.LIST_ITEMS} are taken")
    for host, ports, protocol in seen[: fields.LIST_ITEMS]:
        yield ""
        yield "[[permissions.network]]"
        yield f"host = {text.toml(host)}"
        yield f"ports = {ports}"
        yield f'protocol = "{protocol}"'
    if draft.denied_calls:
        yield ""
        yield "[permissions.syscalls]"
        yield f"deny = {_list(sorted(set(draft.denied_calls)))}"
    if draft.executables:
        yield ""
        yield "[permissions.executables]"
        yield f"allow = {_list(bounded(draft, draft.executables, 'permissions.executables.allow'))}"
    if draft.skills:
        yield ""
        yield "[permissions.skills]"
        yield f"allow = {_list(bounded(draft, draft.skills, 'permissions.skills.allow'))}"
        yield f"side_effects = {_list(sorted(set(draft.side_effects)))}"


def _list(items: list[str]) -> str:
    one = f"[{', '.join(map(text.toml, items))}]"
    if len(one) <= 100:
        return one
    return "\n".join(["[", *(f"    {text.toml(item)}," for item in items), "]"])

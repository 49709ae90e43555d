"""Settings of Claude Code: the rules of ``permissions`` and the section ``sandbox``.

A rule is a tool with a specifier, such as ``Read(~/docs/**)``. `deny` goes before `ask`, and `ask` before `allow`; a
rule that asks grants nothing here. Paths: ``//x`` begins at the root, ``/x`` at the project, ``~/x`` at home.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from policy.importing import documents, host_grants, path_grants, srt
from policy.importing.documents import Document
from policy.importing.host_grants import SourceHost
from policy.importing.path_grants import SourcePath
from policy.importing.vocabulary import Context, Draft, shown

_RULE: Final = re.compile(r"([A-Za-z][A-Za-z0-9_*-]*)(?:\((.*)\))?", re.DOTALL)
_TOP: Final = frozenset({"permissions", "sandbox", "env", "hooks", "model", "apiKeyHelper", "$schema"})
_PERMISSIONS: Final = frozenset({"allow", "ask", "deny", "additionalDirectories", "defaultMode"})
_SANDBOX: Final = frozenset({"enabled", "network", "filesystem", "autoAllowBashIfSandboxed"})
_WRITERS: Final = frozenset({"Edit", "Write", "MultiEdit", "NotebookEdit"})
_READERS: Final = frozenset({"Read", "Glob", "Grep", "LS"})
_PROGRAM: Final = re.compile(r"(/[A-Za-z0-9._/+-]+)(?::\*| \*)")
_DOMAIN: Final = "domain:"


class ToolRule(Struct, frozen=True):
    """One rule, with its place. ``tool`` is empty for a word that is no rule, and may then be any."""

    place: str
    written: str
    tool: str
    specifier: str


def read(raw: bytes, context: Context) -> Draft:
    """Read the settings.

    Raises:
        errors.ImportSourceError: they are malformed.
    """
    draft = Draft(context, entry="claude")
    document = documents.json_object(raw)
    for place in documents.others(document, _TOP):
        draft.inexpressible(place, f"`{place}` has no meaning for this import")
    found = documents.table(document, "permissions", "permissions")
    for place in documents.others(found, _PERMISSIONS, "permissions."):
        draft.inexpressible(place, f"`{place}` has no meaning for this import")
    allow, closed = _rules(found, "allow"), [*_rules(found, "deny"), *_rules(found, "ask")]
    for rule in _rules(found, "ask"):
        draft.narrower(rule.place, f"{shown(rule.written)} asks a person, and is not granted")
    _paths(draft, found, allow, closed)
    _hosts(draft, allow, closed)
    for rule in allow:
        _other(draft, rule, closed)
    if documents.word(found, "defaultMode", "permissions.defaultMode") == "bypassPermissions":
        draft.refused("permissions.defaultMode", "a mode that asks for nothing is not granted")
    _sandbox(draft, documents.table(document, "sandbox", "sandbox"), closed)
    _rest(draft, document)
    return draft


def _rules(found: Document, key: str) -> list[ToolRule]:
    out = []
    for place, written in documents.strings(found, key, f"permissions.{key}"):
        match = _RULE.fullmatch(written.strip())
        tool, specifier = (match[1], (match[2] or "").strip()) if match else ("", "")
        out.append(ToolRule(place, written, tool, "" if specifier == "*" else specifier))
    return out


def _source_path(draft: Draft, rule: ToolRule) -> SourcePath:
    told = rule.specifier
    if not told:
        return SourcePath(rule.place, rule.written, "/", exact=False)
    if told.startswith("/"):
        # `//x` begins at the root, and `/x` at the project.
        told = told[1:]
    elif "/" not in told.removesuffix("/**") and told not in (".", ".."):
        # A name alone is a file of this name at any depth.
        told = f"**/{told}"
    found = path_grants.read(draft, rule.place, told)
    return SourcePath(rule.place, rule.written, found.path, exact=found.exact)


def _paths(draft: Draft, found: Document, allow: list[ToolRule], closed: list[ToolRule]) -> None:
    unread = [_source_path(draft, one) for one in closed if one.tool in _READERS or _any(one)]
    unwritten = [_source_path(draft, one) for one in closed if one.tool in _WRITERS]
    reads = [_source_path(draft, one) for one in allow if one.tool in _READERS]
    writes = [_source_path(draft, one) for one in allow if one.tool in _WRITERS]
    more = [
        path_grants.read(draft, *one)
        for one in documents.strings(found, "additionalDirectories", "permissions.additionalDirectories")
    ]
    draft.read += path_grants.granted(draft, "permissions.filesystem.read", [*reads, *more], unread, write=False)
    draft.workspace += path_grants.granted(draft, "workspace.from", writes, [*unwritten, *unread], write=True)
    if draft.workspace:
        message = "a run works on one directory at or below a path to edit, and a person applies the changes"
        draft.narrower("permissions.allow", message, "covenant workspace apply RUN")


def _any(rule: ToolRule) -> bool:
    """Whether a rule may be about every tool."""
    return rule.tool in ("", "*")


def _hosts(draft: Draft, allow: list[ToolRule], closed: list[ToolRule]) -> None:
    denied = [_host(one) for one in closed if one.tool == "WebFetch" or _any(one)]
    allowed = []
    for rule in allow:
        if rule.tool != "WebFetch":
            continue
        if rule.specifier.startswith(_DOMAIN):
            allowed.append(_host(rule))
        else:
            draft.narrower(rule.place, f"{shown(rule.written)} is not granted: pages are granted by their host")
    draft.fetch += host_grants.granted(draft, allowed, denied)


def _host(rule: ToolRule) -> SourceHost:
    return SourceHost(rule.place, rule.specifier.removeprefix(_DOMAIN) if rule.specifier.startswith(_DOMAIN) else "*")


def _other(draft: Draft, rule: ToolRule, closed: list[ToolRule]) -> None:
    if rule.tool in _READERS | _WRITERS | {"WebFetch"}:
        return
    if rule.tool == "Bash":
        _program(draft, rule, closed)
    elif rule.tool == "WebSearch":
        line = '[services.search] allow = ["PROVIDER"]'
        draft.narrower(rule.place, "searches are not granted: the operator's provider is not known here", line)
    elif rule.tool.startswith("mcp__"):
        line = '[permissions.skills] allow = ["matrix://tool/mcp/SERVER/TOOL@VERSION"], with its class in side_effects'
        draft.narrower(rule.place, f"{shown(rule.written)} is not granted: a tool needs its version and class", line)
    else:
        draft.inexpressible(rule.place, f"{shown(rule.written)} is no grant of a manifest")


def _program(draft: Draft, rule: ToolRule, closed: list[ToolRule]) -> None:
    """A program is granted with every argument: so a rule is taken that names its path and binds none."""
    match = _PROGRAM.fullmatch(rule.specifier)
    line = 'permissions.executables.allow = ["/PATH/OF/PROGRAM"]'
    if match is None:
        message = "a program is granted by its path, and with any arguments"
        draft.narrower(rule.place, f"{shown(rule.written)} is not granted: {message}", line)
        return
    other = next((one for one in closed if one.tool == "Bash" or _any(one)), None)
    if other is not None:
        # A shell's command may start another program in many spellings: any rule may be about this one.
        message = f"{shown(other.written)} ({other.place}) refuses or asks for some commands"
        draft.narrower(rule.place, f"{shown(rule.written)} is not granted: {message}", line)
        return
    one = path_grants.read(draft, rule.place, match[1])
    draft.executables += path_grants.granted(draft, "permissions.executables.allow", [one], [], write=False)


def _sandbox(draft: Draft, found: Document, closed: list[ToolRule]) -> None:
    for place in documents.others(found, _SANDBOX, "sandbox."):
        draft.inexpressible(place, f"`{place}` is not granted: a manifest has no word for it")
    if not documents.flag(found, "enabled", "sandbox.enabled"):
        return
    fetches = [_host(one) for one in closed if one.tool == "WebFetch" or _any(one)]
    unread = [_source_path(draft, one) for one in closed if one.tool in _READERS or _any(one)]
    unwritten = [_source_path(draft, one) for one in closed if one.tool in _WRITERS]
    srt.sections(draft, found, "sandbox.", closed=(tuple(fetches), tuple(unread), tuple(unwritten)))


def _rest(draft: Draft, document: Document) -> None:
    for name in documents.table(document, "env", "env"):
        line = f'[process] env = {{ {name} = "VALUE" }}, or [permissions.credentials] grants = ["{name}"]'
        draft.narrower("env", f"variable {shown(name)} is not copied: its value may be a secret", line)
    if "hooks" in document:
        draft.refused("hooks", "hooks start programs outside of the agent, and are not granted")
    if "apiKeyHelper" in document:
        line = '[services.models] allow = [{ provider = "PROVIDER", models = ["MODEL"] }]'
        draft.refused("apiKeyHelper", "a program that prints a key is not granted; the operator holds the key", line)
    if "model" in document:
        line = '[services.models] allow = [{ provider = "PROVIDER", models = ["MODEL"] }]'
        draft.narrower("model", "models are not granted: the operator's provider is not known here", line)

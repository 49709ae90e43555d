"""config.toml of Codex: ``sandbox_mode`` and the section of the mode ``workspace-write``."""

from __future__ import annotations

from typing import Final

from policy.importing import documents, path_grants
from policy.importing.vocabulary import Context, Draft, malformed, shown

_WORKSPACE: Final = frozenset({"writable_roots", "network_access", "exclude_tmpdir_env_var", "exclude_slash_tmp"})
_TOP: Final = frozenset(
    {"sandbox_mode", "sandbox_workspace_write", "approval_policy", "mcp_servers", "model", "model_provider", "notify"}
    | {"shell_environment_policy", "profiles", "profile", "model_providers", "projects"}
)
_MODES: Final = ("read-only", "workspace-write", "danger-full-access")
# Closed below each root that Codex may write; our own list has a part of them.
_CLOSED: Final = ("**/.agents/**", "**/.codex/**", "**/.git/**")


def read(raw: bytes, context: Context) -> Draft:
    """Read the configuration.

    Raises:
        errors.ImportSourceError: it is malformed, or names a mode that Codex does not have.
    """
    draft = Draft(context, entry="codex")
    document = documents.toml_table(raw)
    for place in documents.others(document, _TOP):
        draft.inexpressible(place, f"`{place}` has no meaning for this import")
    mode = documents.word(document, "sandbox_mode", "sandbox_mode", "read-only")
    if mode not in _MODES:
        raise malformed(
            f"sandbox_mode is {shown(mode)}", where="sandbox_mode", hint=f"write one of {', '.join(_MODES)}"
        )
    if "profile" in document or "profiles" in document:
        draft.inexpressible("profiles", "profiles are not read: the top level alone counts")
    if mode == "danger-full-access":
        draft.refused("sandbox_mode", "full access is not granted; name what the agent needs")
    if mode == "workspace-write":
        _workspace(draft, documents.table(document, "sandbox_workspace_write", "sandbox_workspace_write"))
    elif "sandbox_workspace_write" in document:
        draft.inexpressible("sandbox_workspace_write", f"it has no effect in the mode {shown(mode)}")
    _rest(draft, document)
    return draft


def _workspace(draft: Draft, found: documents.Document) -> None:
    prefix = "sandbox_workspace_write."
    for place in documents.others(found, _WORKSPACE, prefix):
        draft.inexpressible(place, f"`{place}` is not granted: a manifest has no word for it")
    # The directory that Codex is started in can be written as well.
    own = [path_grants.read(draft, "sandbox_mode", ".")]
    roots = documents.strings(found, "writable_roots", f"{prefix}writable_roots")
    own += [path_grants.read(draft, *one) for one in roots]
    draft.workspace = path_grants.granted(draft, "workspace.from", own, [], write=True)
    if draft.workspace:
        draft.protect = list(_CLOSED)
        message = "a run works on one directory at or below a root to write, and a person applies the changes"
        draft.narrower(f"{prefix}writable_roots", message, "covenant workspace apply RUN")
    draft.scratch = not documents.flag(found, "exclude_slash_tmp", f"{prefix}exclude_slash_tmp")
    if documents.flag(found, "network_access", f"{prefix}network_access"):
        draft.mode = "full"
        message = "public addresses are granted; private, loopback and metadata ones are not"
        draft.narrower(f"{prefix}network_access", message, '[[permissions.network]] host = "ADDRESS"')


def _rest(draft: Draft, document: documents.Document) -> None:
    for name in documents.table(document, "mcp_servers", "mcp_servers"):
        line = '[permissions.skills] allow = ["matrix://tool/mcp/SERVER/TOOL@VERSION"], with its class in side_effects'
        draft.narrower("mcp_servers", f"server {shown(name)} is not granted: tools.json names its tools", line)
    for key in ("model", "model_provider", "model_providers"):
        if key in document:
            line = '[services.models] allow = [{ provider = "PROVIDER", models = ["MODEL"] }]'
            draft.narrower(key, "models are not granted: the operator's provider is not known here", line)
    if "notify" in document:
        draft.refused("notify", "a program that is started outside of the agent is not granted")
    if "shell_environment_policy" in document:
        draft.narrower("shell_environment_policy", "no variable of the caller reaches the agent", "[process] env = {}")
    if "approval_policy" in document:
        draft.inexpressible("approval_policy", "nothing is granted that a person was asked for")
    if "projects" in document:
        draft.inexpressible("projects", "trust in directories is the caller's, who gives the workspace")

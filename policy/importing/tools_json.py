"""tools.json of Matrix: the tools of an agent as skills.

The file itself stays beside agent.toml, where it names the servers. A tool is granted when its class is one of
``allowed_side_effects``.
"""

from __future__ import annotations

from policy import errors
from policy.importing import documents
from policy.importing.vocabulary import Context, Draft, malformed, shown
from policy.manifest.tools import document as tool_manifests
from policy.manifest.tools.document import NATIVE_CLASS


def read(raw: bytes, context: Context) -> Draft:
    """Read the tool manifest.

    Raises:
        errors.ImportSourceError: the reader of tools.json refuses it; the error says where and why.
    """
    documents.decoded(raw)
    try:
        tools = tool_manifests.parse(raw)
    except errors.ManifestError as e:
        raise malformed(e.message, where=e.where or tool_manifests.FILE, hint=e.hint or "see docs/tools.md") from None
    draft = Draft(context)
    for path, uri, side_effect in tools.tools():
        place = tools.where(path)
        if side_effect not in tools.allowed_side_effects:
            message = f"{shown(str(uri))} is not granted: its class {shown(side_effect)} is not allowed there"
            draft.narrower(place, message, "")
        elif side_effect == NATIVE_CLASS:
            draft.narrower(place, f"{shown(str(uri))} is not granted: a tool of the host has no server here")
        else:
            draft.skills.append(str(uri))
            draft.side_effects.append(side_effect)
    for server in tools.servers:
        draft.inexpressible(
            server.alias, f"server {shown(server.alias)} stays in tools.json", "covenant tools pin PACKAGE"
        )
        for _, name in server.credentials():
            line = f'[permissions.credentials] grants = ["{name}"]'
            draft.narrower(server.alias, f"credential {shown(name)} is not granted", line)
    if tools.agent_id != context.agent_id:
        message = f"tools.json is of the agent {shown(tools.agent_id)}"
        draft.inexpressible("agent", message, f'agent.id = "{tools.agent_id}"')
    draft.inexpressible("", "tools.json names no program", 'agent.entry = "PROGRAM"')
    return draft

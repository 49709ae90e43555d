"""Settings of Anthropic's sandbox-runtime (``srt``): domains, paths to read and paths to write.

There everything may be read but ``denyRead``, nothing written but ``allowWrite``, and no domain reached but
``allowedDomains``. ``allowRead`` opens a part of ``denyRead`` again. Some files stay closed below ``allowWrite``
(settings of shells, git and editors), so a path to write becomes a workspace, from which a person applies the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policy.importing import documents, host_grants, path_grants
from policy.importing.documents import Document
from policy.importing.host_grants import SourceHost
from policy.importing.path_grants import SourcePath
from policy.importing.vocabulary import Context, Draft, shown

_TOP: Final = frozenset({"network", "filesystem", "ignoreViolations", "ripgrep", "mandatoryDenySearchDepth"})
_NETWORK: Final = frozenset({"allowedDomains", "deniedDomains"})
_FILES: Final = frozenset({"allowRead", "denyRead", "allowWrite", "denyWrite"})
# Without an effect on what is allowed.
_HARMLESS: Final = frozenset({"ignoreViolations", "ripgrep", "mandatoryDenySearchDepth"})
_SCRATCH: Final = "/tmp"  # noqa: S108 - the agent's own, and no file of ours
# Closed below each path of allowWrite. Of git our own list takes care.
_CLOSED: Final = (
    "**/.bash_profile",
    "**/.bashrc",
    "**/.gitconfig",
    "**/.gitmodules",
    "**/.idea/**",
    "**/.mcp.json",
    "**/.profile",
    "**/.ripgreprc",
    "**/.vscode/**",
    "**/.zprofile",
    "**/.zshrc",
)


def read(raw: bytes, context: Context) -> Draft:
    """Read the settings.

    Raises:
        errors.ImportSourceError: they are malformed.
    """
    draft = Draft(context)
    document = documents.json_object(raw)
    for place in documents.others(document, _TOP):
        draft.inexpressible(place, f"`{place}` has no meaning for this import")
    for key in sorted(_HARMLESS & document.keys()):
        draft.inexpressible(key, f"`{key}` steers srt itself, and grants nothing")
    sections(draft, document)
    if not context.entry:
        draft.inexpressible("", "srt's settings name no program", 'agent.entry = "PROGRAM"')
    return draft


Closed = tuple[Sequence[SourceHost], Sequence[SourcePath], Sequence[SourcePath]]


def sections(draft: Draft, document: Document, prefix: str = "", *, closed: Closed = ((), (), ())) -> None:
    """Read ``network`` and ``filesystem`` of a document whose places begin with ``prefix``.

    ``closed`` are further hosts, paths to read and paths to write that are denied.
    """
    network = documents.table(document, "network", f"{prefix}network")
    files = documents.table(document, "filesystem", f"{prefix}filesystem")
    _network(draft, network, f"{prefix}network.", closed[0])
    _filesystem(draft, files, f"{prefix}filesystem.", closed)


def _network(draft: Draft, found: Document, prefix: str, closed: Sequence[SourceHost]) -> None:
    for place in documents.others(found, _NETWORK, prefix):
        draft.narrower(place, f"`{place}` is not granted: a manifest has no word for it")
    allowed, denied = (
        [SourceHost(*one) for one in documents.strings(found, key, f"{prefix}{key}")]
        for key in ("allowedDomains", "deniedDomains")
    )
    for host in host_grants.granted(draft, allowed, [*denied, *closed]):
        draft.network.append((host, "[443]", "tls"))
    if draft.network:
        message = "domains are granted by TLS on port 443 alone"
        line = 'resources.network = "full", and the ports of each [[permissions.network]]'
        draft.narrower(f"{prefix}allowedDomains", message, line)


def _filesystem(draft: Draft, found: Document, prefix: str, closed: Closed) -> None:
    for place in documents.others(found, _FILES, prefix):
        draft.narrower(place, f"`{place}` is not granted: a manifest has no word for it")
    allow_read, deny_read, allow_write, deny_write = (
        [path_grants.read(draft, *one) for one in documents.strings(found, key, f"{prefix}{key}")]
        for key in ("allowRead", "denyRead", "allowWrite", "denyWrite")
    )
    # A path of allowRead is readable again although denyRead has one above it; one below it stays closed here.
    for one in allow_read:
        below = [two for two in deny_read if path_grants.within(two.path, one.path) or not two.exact]
        below += closed[1]
        draft.read += path_grants.granted(draft, "permissions.filesystem.read", [one], below, write=False)
    scratch = [one for one in allow_write if one.exact and path_grants.within(one.path, _SCRATCH)]
    for one in scratch:
        draft.scratch = True
        draft.narrower(one.place, f"{shown(one.written)} is a /tmp of the agent's own, which is thrown away")
    rest = [one for one in allow_write if one not in scratch]
    denied = [*deny_write, *deny_read, *closed[1], *closed[2]]
    draft.workspace += path_grants.granted(draft, "workspace.from", rest, denied, write=True)
    if draft.workspace:
        draft.protect = list(_CLOSED)
        message = "a run works on one directory at or below a path to write, and a person applies the changes"
        draft.narrower(f"{prefix}allowWrite", message, "covenant workspace apply RUN")

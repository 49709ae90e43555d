"""The agent's own limits as a document that it can read: /run/covenant/policy.json of its root (ADR 0075).

It holds what the manifest grants, and no more of the host than that: no digest of a host file that the manifest does
not name, no path of the supervisor, no address of the gateway, no value of a secret and no environment variable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from policy.compile import init, mounts, workspace
from policy.grants.effective import Effective
from policy.manifest.agent import Manifest
from policy.manifest.permissions import HOST_NAME

POLICY: Final = "policy.json"
DENIALS: Final = "denials.jsonl"
VERSION: Final = 1
# The most bytes of the document. Longer lists are cut, and `cut` says how many items are missing.
MAX_BYTES: Final = 262_144
_GRANTS: Final = (
    *("filesystem", "network", "syscalls", "executables", "credentials"),
    *("skills", "spawning", "services", "publish", "inject", "web", "host_ports", "ssh", "may_grant", "agents"),
    *("telemetry",),
)


def document(effective: Effective, manifest: Manifest) -> dict[str, Any]:
    """Return the whole document: the agent, its grants, its limits, and the services that answer it.

    ``effective`` are the grants of this run, of which a parent may have taken some.
    """
    whole = effective.canonical()
    limits = {**whole["resources"], **whole["lifetime"], "dev_shm_mb": mounts.shared_mb(effective, manifest)}
    terms = workspace.terms(effective, manifest)
    return {
        "version": VERSION,
        "agent": {"id": manifest.agent.id, "version": manifest.agent.version, "role": manifest.agent.role},
        "grants": {name: whole[name] for name in _GRANTS if name in whole},
        "limits": limits,
        **({} if terms is None else {"workspace": {"path": manifest.workspace.path, **terms}}),
        "services": list(_services(effective, manifest)),
        "denials": f"{mounts.OWN_LIMITS}/{DENIALS}",
    }


def encoded(effective: Effective, manifest: Manifest) -> bytes:
    """Return the document as JSON of at most ``MAX_BYTES``, with its longest lists cut where it would be longer.

    Raises:
        ValueError: it is longer without any list, which no manifest can bring about.
    """
    whole = document(effective, manifest)
    raw, most = _json(whole), MAX_BYTES
    while len(raw) > MAX_BYTES:
        if most == 0:
            raise ValueError(f"the document of own limits has over {MAX_BYTES} bytes without its lists")
        # Every list is cut to the same length: the short ones stay whole.
        most //= 2
        cut: dict[str, int] = {}
        raw = _json({**{name: _cut(part, name, most, cut) for name, part in whole.items()}, "cut": cut})
    return raw


def _services(effective: Effective, manifest: Manifest) -> Iterator[dict[str, Any]]:
    asked = [
        *(["spawn"] if effective.spawning.allowed else []),
        *(["credential"] if effective.credentials.listing() else []),
        *(["mcp"] if effective.skills.mcp else []),
    ]
    if asked:
        yield {"name": "broker", "at": "descriptor 3", "kinds": asked}
    if mounts.as_files(effective, manifest):
        yield {"name": "credentials", "at": mounts.CREDENTIALS, "kinds": ["file"]}
    for name, path, granted, kinds in (
        ("models", "", effective.services, ["openai", "anthropic"]),
        ("search", "/search?q=WORDS&count=N", effective.web.search, ["json"]),
        ("fetch", "/fetch?url=URL", effective.web.fetch, ["text"]),
        ("tools", "/mcp", effective.skills.mcp, ["mcp"]),
        ("telemetry", "", effective.telemetry, list(effective.telemetry.signals)),
    ):
        if granted:
            yield {"name": name, "at": f"http://{name}.covenant{path}", "kinds": kinds}
    for one in effective.agents.listing():
        yield {"name": one, "at": f"http://agents.covenant/{one}", "kinds": ["a2a"]}
    for name, _ in effective.skills.commands:
        yield {"name": name, "at": f"http://tools.covenant/command/{name}", "kinds": ["command"]}
    for port in effective.host_ports.numbers():
        yield {"name": "host", "at": f"{HOST_NAME}:{port}", "kinds": ["tcp"]}
    if effective.ssh:
        yield {"name": "ssh-agent", "at": init.SSH_SOCKET, "kinds": ["list", "sign"]}
    if effective.network.total:
        yield {"name": "names", "at": mounts.RESOLVER, "kinds": ["A", "AAAA", "HTTPS"]}


def _cut(value: Any, place: str, most: int, cut: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {name: _cut(part, f"{place}.{name}", most, cut) for name, part in value.items()}
    if not isinstance(value, list) or all(type(one) is int for one in value):  # a range of ports is no list
        return value
    if len(value) > most:
        cut[place] = cut.get(place, 0) + len(value) - most
    return [_cut(one, place, most, cut) for one in value[:most]]


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"

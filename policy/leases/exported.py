"""The lines of agent.toml that grant what a lease did, for the next signature."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from policy.grants.sets.spans import Spans
from policy.manifest import text
from policy.manifest.permissions import INJECT_PATH
from policy.manifest.tools import command


def network(host: str, ports: Spans) -> tuple[str, ...]:
    """Return an entry for a name by TLS."""
    listed = ", ".join(str(a) if a == b else text.toml(f"{a}-{b}") for a, b in ports)
    return "[[permissions.network]]", f"host = {text.toml(host)}", f"ports = [{listed}]", 'protocol = "tls"'


def tool(uri: str, side_effect: str) -> tuple[str, ...]:
    """Return the grant of a tool or a command without a question."""
    if (found := command.bound(uri)) is not None:
        name, agent = found
        return "[[tools.command]]", f"name = {text.toml(name)}", f"agent = {text.toml(agent)}"
    classes = (f"side_effects = [{text.toml(side_effect)}]",) if side_effect else ()
    return "[permissions.skills]", f"allow = [{text.toml(uri)}]", *classes


def request(method: str, host: str, path: str) -> tuple[str, ...]:
    """Return what grants a request with a secret: additions to the entry of its host, whose secret is written there."""
    if not re.fullmatch(INJECT_PATH, path) or "*" in path:
        return (f"# no path of a manifest is {path}: take in what begins so, or leave it asked about",)
    return (
        f"# in inject of the entry for {host}; each method there is granted for each path",
        f"methods = [{text.toml(method)}]",
        f"paths = [{text.toml(path)}]",
    )


def of_rows(kinds: Iterable[Mapping[str, Any]], run: str) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """Return each different grant of the run whose id begins so, with its lines, from the rows of a log."""
    found: dict[tuple[str, ...], tuple[Mapping[str, Any], tuple[str, ...]]] = {}
    for kind in kinds:
        if kind.get("type") == "approval_granted" and str(kind.get("run_id")).startswith(run):
            lines = tuple(map(str, kind.get("add", ())))
            found.setdefault((str(kind["run_id"]), *lines), (kind, lines))
    return list(found.values())

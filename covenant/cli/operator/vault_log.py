"""Rows of the supervisor's log about secrets: each change, written before it is made, and each use by an agent."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from sandbox.config import Config
    from sandbox.vault.backend import Change, SecretEntry

_ROWS = ("credential_granted", "denied", "vault_changed")


def writer(config: Config, backend: str) -> Callable[[Change], None]:
    """Writes the row of a change, durable before it is made."""
    from covenant.keys import identity
    from sandbox.audit.log import Ledger
    from sandbox.storage.trust_state import State

    home = common.home()

    def write(change: Change) -> None:
        fields = {
            "operator": identity.OPERATOR,
            "backend": backend,
            "action": change.action,
            "agent_id": change.agent_id or None,
            "name": change.name or None,
            "version": change.version or None,
        }
        with (
            State(config.state) as state,
            Ledger.open(state.path / "audit", head=state.path / "audit-head" / "head.json") as ledger,
        ):
            ledger.append("vault_changed", fields, issuer=identity.issuer(home), now_ms=int(time.time() * 1000))

    return write


def rows() -> list[dict[str, Any]]:
    """The rows about secrets in the supervisor's log, oldest first; what cannot be read as one is skipped."""
    from covenant.cli.audit import read_logs

    found = []
    for line in (line for log in read_logs.read_logs() if log.name == "supervisor" for line in log.events.split(b"\n")):
        if not any(f'"{kind}"'.encode() in line for kind in _ROWS):
            continue
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            event = json.loads(line)
            kind = event["kind"]
            if kind["type"] == "denied" and kind["layer"] != "credential":
                continue
            found.append(_row(kind, event["timestamp_ms"]))
    return found


def _row(kind: dict[str, Any], timestamp_ms: int) -> dict[str, Any]:
    what = {"credential_granted": "granted", "denied": "refused"}.get(kind["type"]) or kind["action"]
    return {
        "timestamp_ms": timestamp_ms,
        "what": what,
        "agent_id": kind["agent_id"],
        "name": kind.get("name") or kind.get("target") or None,
        "version": kind.get("version"),
        "run_id": kind.get("run_id"),
        "code": kind.get("code"),
        "count": kind.get("count", 1),
        "operator": kind.get("operator"),
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row["timestamp_ms"] / 1000))
    whose = f" {row['agent_id']}" if row["agent_id"] else ""
    name = f" {row['name']}" if row["name"] else ""
    more = [f"version {row['version']}" if row["version"] else "", row["code"] or ""]
    more += [f"{row['count']} times" if row["count"] > 1 else "", f"run {row['run_id']}" if row["run_id"] else ""]
    return f"{at}  {row['what']}{whose}{name}" + "".join(f"  {one}" for one in more if one)


def disagreements(backend: str, entries: list[SecretEntry], agent: str | None) -> list[str]:
    """Return the secrets whose version in the log differs from the vault's.

    Causes: an older vault was restored, a change was interrupted after its row, or the server was changed by other
    means.
    """
    said: dict[tuple[str, str], int] = {}
    try:
        told = rows()
    except errors.LedgerError:
        return []
    for row in told:
        if row["what"] in ("put", "rotated", "removed") and agent in (None, row["agent_id"]):
            said[row["agent_id"], row["name"]] = 0 if row["what"] == "removed" else row["version"]
        elif row["what"] == "created":
            said.clear()
    held = {(entry.agent_id, entry.name): entry.version for entry in entries}
    pairs = [(place, version, held.get(place, 0)) for place, version in sorted(said.items())]
    return [
        f"the log has {name} of {whose} as {_version(logged)}, the {backend} vault as {_version(there)}"
        for (whose, name), logged, there in pairs
        if logged != there
    ]


def _version(number: int) -> str:
    return f"version {number}" if number else "removed"

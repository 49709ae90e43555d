"""Denials of a running agent, from each layer: one shape, one id, few rows.

The id of a denial is a digest over its own fields alone, without the run and the policy. So the same refusal has the
same id on the screen, in the log and in ``covenant policy why``, in every run and under every policy that refuses it.

``Bounds`` limits the rows of a flood: the first of a denial at once, its repeats as one summary a second, at most 1,000
rows a run, and the rest as one number a layer at the end. This module reads no clock.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec import Struct

# Who refuses, in words.
LAYERS: Final[Mapping[str, str]] = {
    "dns": "the DNS gate",
    "sni": "the TLS gate",
    "packet": "the gateway's firewall",
    "syscall": "the system call filter",
    "path": "the agent's root",
    "exec": "what may be started",
    "memory": "the memory limit",
    "pids": "the limit on processes",
    "time": "a clock",
    "disk": "the limit on scratch space",
    "spawn": "the rules for what an agent may start",
    "credential": "the broker of secrets",
    "model": "the service gate",
    "inject": "the gate that adds secrets",
    "tool": "the check of tool calls",
    "ssh": "the gate that signs logins",
}
MAX_ROWS: Final = 1000
# Summaries may take half: a flood at one place must leave rows for what is refused elsewhere.
MAX_SUMMARIES: Final = MAX_ROWS // 2
SUMMARY_MS: Final = 1000
# A name has 253 characters, a path 4,096; what a hijacked gate sends may have more.
_MAX_TARGET: Final = 1024
_CODE = re.compile(r"[a-z0-9_]{1,64}")
# What stands in the row of a number that is no denial of its own.
REST_TARGET, REST_CODE = "", "not_listed"
_ID = re.compile(r"d-[0-9a-f]{12}")
# What a layer says of what no grant allows; the gates have their own words (sandbox.network).
NOT_GRANTED: Final = "not_granted"
# A granted call that was refused for its arguments, which no layer reports.
ARGUMENTS: Final = "arguments"
# A request that an operator is asked about, and that no lease covers.
NOT_APPROVED: Final = "not_approved"
# A path that is there and may not be written; scratch space that is used up; one process or thread too many.
READ_ONLY: Final = "read_only"
FULL: Final = "full"
TOO_MANY: Final = "too_many"
# The second wall around processes, of the host's own tasks.
HOST_TASKS: Final = "host_tasks"
# The target of a program start whose path no layer reports.
EXECVE: Final = "execve"
# The limits of tool calls: each is its code and its key.
TOOL_LIMITS: Final = ("calls", "calls_per_minute", "call_ms", "argument_bytes", "answer_bytes")
# The key of agent.toml that would have allowed it, by layer and code; what is not here no line of a manifest allows.
_GRANTS: Final[Mapping[tuple[str, str], str]] = {
    ("dns", "name_not_granted"): "permissions.network",
    ("sni", "sni_not_granted"): "permissions.network",
    # A grant by tcp is not looked into.
    ("sni", "not_tls"): "permissions.network",
    ("sni", "no_sni"): "permissions.network",
    ("packet", NOT_GRANTED): "permissions.network",
    ("syscall", NOT_GRANTED): "permissions.syscalls",
    ("path", NOT_GRANTED): "permissions.filesystem",
    ("path", READ_ONLY): "permissions.filesystem",
    ("exec", NOT_GRANTED): "permissions.executables",
    ("credential", NOT_GRANTED): "permissions.credentials",
    ("model", "model_not_granted"): "services.models",
    ("inject", "request_not_granted"): "permissions.network.inject",
    ("inject", NOT_APPROVED): "permissions.network.inject.on_deny",
    ("model", "search_not_granted"): "services.search",
    ("ssh", "host_not_granted"): "services.ssh_agent",
    ("ssh", "key_not_granted"): "services.ssh_agent",
    ("model", "host_not_granted"): "services.fetch",
    ("model", "agent_not_granted"): "services.agents",
    ("model", "signal_not_granted"): "services.telemetry",
    ("tool", NOT_GRANTED): "permissions.skills",
    ("tool", ARGUMENTS): "permissions.skills.rule",
    ("tool", NOT_APPROVED): "permissions.skills.ask",
    **{("tool", key): f"permissions.skills.{key}" for key in TOOL_LIMITS},
}
# Clocks and sizes are keys of their own; --timeout, the parent's end and the envelope's are no lines of a manifest.
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "resources": frozenset({"memory_mb", "pids_max", "disk_mb", "cpu_ms_per_task", "cpu_time_ms"}),
    "lifetime": frozenset({"ttl_seconds"}),
}


class Denial(Struct, frozen=True):
    """One refusal. ``layer`` is who refused (``dns``, ``sni``, ``packet``, ``memory``, ...), ``target`` what was wanted
    in the spelling that ``covenant policy why`` takes, ``code`` why it was refused."""

    layer: str
    target: str
    code: str

    @property
    def id(self) -> str:
        """Its name: ``d-`` and 12 hexadecimal digits of the SHA-256 of layer, target and code."""
        words = (self.layer, self.target, self.code)
        # Each with its length before it: no two triples are one text.
        text = "".join(f"{len(word)}:{word}" for word in words)
        return f"d-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"

    @property
    def grant(self) -> str | None:
        """The key of agent.toml that would have allowed it, as ``permissions.network``; None when no line would."""
        if self.layer in ("memory", "pids", "time", "disk"):
            return next((f"{table}.{self.target}" for table, keys in _KEYS.items() if self.target in keys), None)
        return _GRANTS.get((self.layer, self.code))


def is_id(text: str) -> bool:
    """Whether this is how an id is written."""
    return _ID.fullmatch(text) is not None


def checked(denial: Denial) -> Denial:
    """The denial as it may be written down: what reports it may itself be in an agent's hands.

    An unknown layer or a malformed code is ``unknown``; a target longer than 1,024 characters ends in its digest, so
    that two long ones stay two.
    """
    layer = denial.layer if denial.layer in LAYERS else "unknown"
    code = denial.code if _CODE.fullmatch(denial.code) else "unknown"
    target = denial.target
    if len(target) > _MAX_TARGET:
        digest = hashlib.sha256(target.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        target = f"{target[:_MAX_TARGET]}...{digest}"
    return Denial(layer, target, code)


class Told(Protocol):
    """Takes a denial and how often it came."""

    def __call__(self, denial: Denial, *, count: int = 1) -> None: ...


class Row(Struct, frozen=True):
    """A row to write: ``count`` refusals of this denial since its last row."""

    denial: Denial
    count: int


@dataclass(slots=True)
class _Seen:
    """A denial that has a row: how often it came since, and when it may have its next."""

    again: int
    due_ms: int


@dataclass(slots=True)
class Bounds:
    """The bounds of one run. Times are milliseconds of any clock that does not go back.

    Every refusal that was told is counted in exactly one row, and a run has at most ``MAX_ROWS`` of them.
    """

    rows: int = 0
    summaries: int = 0
    _seen: dict[Denial, _Seen] = field(default_factory=dict)
    _waiting: set[Denial] = field(default_factory=set)
    _rest: dict[str, int] = field(default_factory=dict)

    def told(self, denial: Denial, *, now_ms: int, count: int = 1) -> list[Row]:
        """Return the rows to write now for ``count`` refusals: the first of a denial, or none yet."""
        denial = checked(denial)
        if (seen := self._seen.get(denial)) is not None:
            seen.again += count
            self._waiting.add(denial)
            return []
        if self.rows >= MAX_ROWS - len(LAYERS) - 1:
            self._rest[denial.layer] = self._rest.get(denial.layer, 0) + count
            return []
        self._seen[denial] = _Seen(0, now_ms + SUMMARY_MS)
        self.rows += 1
        return [Row(denial, count)]

    def due(self, *, now_ms: int) -> list[Row]:
        """The summaries whose second is over."""
        return [
            self._summary(denial, now_ms)
            for denial in sorted(self._waiting, key=_order)
            if self._seen[denial].due_ms <= now_ms and self._room()
        ]

    def wind_up(self) -> list[Row]:
        """Return the last rows of the run: the open summaries, then one number a layer for refusals without a row."""
        out = []
        for denial in sorted(self._waiting, key=_order):
            if self.rows < MAX_ROWS - len(LAYERS) - 1:
                out.append(self._summary(denial, 0))
            else:
                self._rest[denial.layer] = self._rest.get(denial.layer, 0) + self._seen[denial].again
                self._seen[denial].again = 0
        self._waiting.clear()
        # INVARIANT: one row a layer and one for what is unknown were kept free for these.
        for layer, count in sorted(self._rest.items()):
            out.append(Row(Denial(layer, REST_TARGET, REST_CODE), count))
            self.rows += 1
        self._rest.clear()
        return out

    def _room(self) -> bool:
        return self.summaries < MAX_SUMMARIES and self.rows < MAX_ROWS - len(LAYERS) - 1

    def _summary(self, denial: Denial, now_ms: int) -> Row:
        seen = self._seen[denial]
        row = Row(denial, seen.again)
        seen.again, seen.due_ms = 0, now_ms + SUMMARY_MS
        self._waiting.discard(denial)
        self.rows += 1
        self.summaries += 1
        return row


def _order(denial: Denial) -> tuple[str, str, str]:
    return denial.layer, denial.target, denial.code

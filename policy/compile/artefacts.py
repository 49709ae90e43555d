"""What a policy compiles to: named byte strings, their causes, and one digest over all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The closed set of artefacts and the file names that `policy compile` gives them. The digest covers them in
# this order, so that adding one is a change of format and not an accident.
NAMES = (
    "config.json",
    "seccomp.json",
    "seccomp.bpf",
    "cgroup.json",
    "mounts.json",
    "network.json",
    "runtime.json",
    "effective.json",
    "provenance.json",
)


def canonical(document: Any) -> bytes:
    """One spelling of a JSON document: sorted keys, no spaces, ASCII, a final newline."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Artefacts:
    """The compiled policy. ``files`` holds exactly the names of ``NAMES``."""

    files: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if set(self.files) != set(NAMES):
            raise ValueError(f"artefacts must be exactly {NAMES}")

    @property
    def digest(self) -> str:
        """Hex SHA-256 over every artefact, each with its name and length, so that no byte can move between two."""
        h = hashlib.sha256(b"covenant-policy-v1\n")
        for name in NAMES:
            h.update(f"{name}:{len(self.files[name])}\n".encode())
            h.update(self.files[name])
        return h.hexdigest()

    def json(self, name: str) -> Any:
        """The parsed artefact ``name``."""
        return json.loads(self.files[name])


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a rule was emitted: a key that the manifest wrote, or a default or built-in of ours with its reason.

    ``kind`` is ``manifest``, ``default`` or ``built-in``; ``key`` is the dotted manifest key for the first two
    (``permissions.filesystem.read[0]``) and the name of the built-in for the third.
    """

    kind: str
    key: str
    reason: str = ""

    def document(self) -> dict[str, str]:
        """As it stands in provenance.json."""
        out = {"kind": self.kind, "key": self.key}
        return {**out, "reason": self.reason} if self.reason else out


def built_in(name: str, reason: str) -> Cause:
    """A rule that is in every policy of this backend."""
    return Cause("built-in", name, reason)


@dataclass
class Provenance:
    """Collects rule -> causes while compiling. A rule id is ``artefact:place``, unique."""

    causes: dict[str, Cause] = field(default_factory=dict)

    def add(self, rule: str, cause: Cause) -> None:
        """Record why ``rule`` is emitted; the first cause stays when two grants want the same rule."""
        self.causes.setdefault(rule, cause)

    def document(self) -> dict[str, Any]:
        """As it stands in provenance.json, sorted by rule."""
        return {"version": 1, "rules": {rule: self.causes[rule].document() for rule in sorted(self.causes)}}

"""The artefacts of a policy: named byte strings, their causes, and one digest over all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quoted
from operator import itemgetter
from typing import Any

from msgspec import Struct

# The closed set of artefacts and the file names that `policy compile` gives them. The digest covers them in
# this order, so that adding one is a change of format and not an accident (docs/adr/0017).
NAMES = (
    "config.json",
    "seccomp.json",
    "seccomp.bpf",
    "cgroup.json",
    "mounts.json",
    "network.json",
    "firewall.nft",
    "gates.json",
    "credentials.json",
    "supervision.json",
    "runtime.json",
    "effective.json",
    "provenance.json",
)
_DIGEST_PREFIX = b"covenant-policy-v2\n"

# Our own documents hold no cycle, and looking for one costs a third of the time.
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False).encode

_first = itemgetter(0)


def canonical(document: Any) -> bytes:
    """One spelling of a JSON document: sorted keys, no spaces, ASCII, a final newline."""
    return _encode(document).encode() + b"\n"


class Artefacts(Struct, frozen=True):
    """The compiled policy. ``files`` holds exactly the names of ``NAMES``."""

    files: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if set(self.files) != set(NAMES):
            raise ValueError(f"artefacts must be exactly {NAMES}")

    @property
    def digest(self) -> str:
        """Hex SHA-256 over every artefact, each with its name and length, so that no byte can move between two."""
        h = hashlib.sha256(_DIGEST_PREFIX)
        for name in NAMES:
            h.update(f"{name}:{len(self.files[name])}\n".encode())
            h.update(self.files[name])
        return h.hexdigest()

    def json(self, name: str) -> Any:
        """The parsed artefact ``name``."""
        return json.loads(self.files[name])


class Cause(Struct, frozen=True):
    """Why a rule was emitted: a key that the manifest wrote, or a default or built-in of ours with its reason.

    ``kind`` is ``manifest``, ``default`` or ``built-in``; ``key`` is the dotted manifest key for the first two
    (``permissions.filesystem.read[0]``) and the name of the built-in for the third. ``parent`` says what a parent's
    ceiling took of it, empty when it took nothing.
    """

    kind: str
    key: str
    reason: str = ""
    parent: str = ""

    def document(self) -> dict[str, str]:
        """As it stands in provenance.json."""
        out = {"kind": self.kind, "key": self.key}
        if self.reason:
            out["reason"] = self.reason
        if self.parent:
            out["parent"] = self.parent
        return out


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

    def encoded(self) -> bytes:
        """provenance.json: ``canonical`` of version 2 and the rules, sorted, each with its cause.

        Written out by hand, since it is half of all that is compiled: hundreds of rules share a handful of causes,
        the calls of a profile above all, and each cause is encoded once.
        """
        said: dict[int, str] = {}
        rules = []
        for rule, cause in sorted(self.causes.items(), key=_first):
            text = said.get(id(cause))
            if text is None:
                fields = sorted(cause.document().items())
                text = said[id(cause)] = ",".join(f"{_quoted(name)}:{_quoted(value)}" for name, value in fields)
            rules.append(f"{_quoted(rule)}:{{{text}}}")
        return f'{{"rules":{{{",".join(rules)}}},"version":2}}\n'.encode("ascii")

"""coordinator: splits a question into parts, has a librarian look up each, and joins the answers with their sources.

Each librarian is started for one part and given less than it asks for: where directories are named like something in
the question, it may read these and no others. All of them search at the same time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from typing import Any

BROKER = 3
CHILD = "librarian"
PARTS = 3
SHELVES = 24
# What each may take: three of them fit beside this agent itself.
LIMITS = {"memory_mb": 128, "pids_max": 8, "cpu_millis": 300}


class Broker:
    """Requests to the supervisor: a line each way, answers in any order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._answers = open(descriptor, "rb", closefd=False)
        self._held: dict[int, dict[str, Any]] = {}
        self._last = 0

    def send(self, kind: str, **fields: object) -> int:
        """Ask, and do not wait."""
        self._last += 1
        line = json.dumps({"id": self._last, "kind": kind, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line):]
        return self._last

    def answer(self, ident: int) -> dict[str, Any]:
        """The answer to a request, whenever it comes."""
        while ident not in self._held:
            line = self._answers.readline()
            if not line:
                return {"error": {"code": "gone", "message": "nobody answers any more"}}
            said = json.loads(line)
            self._held[said.pop("id")] = said
        return self._held.pop(ident)


def parts_of(question: str) -> list[str]:
    """The question cut where people join two: at ends of sentences, semicolons and `and`."""
    cut = re.split(r"[;?!\n]+|\.\s+|,?\s+and\s+", question)
    parts = [part.strip(" .,") for part in cut if part.strip(" .,")]
    # What is left over belongs to the last part: nothing that was asked is dropped.
    return parts if len(parts) <= PARTS else [*parts[: PARTS - 1], " and ".join(parts[PARTS - 1:])]


def shelves(part: str, roots: list[str]) -> list[str]:
    """The directories that are named like a word of the part; none when no name says anything."""
    words = {word for word in re.findall(r"[a-z0-9][a-z0-9+.-]{2,}", part.lower())}
    found = []
    for root in roots:
        try:
            names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        found += [f"{root}/{name}" for name in names if words & set(re.split(r"[-_.\d]+", name.lower()))]
    return found[:SHELVES]


def look_up(broker: Broker, parts: list[str], roots: list[str]) -> list[dict[str, Any]]:
    """Return the result of each part.

    All children are spawned before the first wait, so that they run at the same time.
    """
    asked = []
    for part in parts:
        narrow = shelves(part, roots)
        only = {**LIMITS, "read": narrow} if narrow else dict(LIMITS)
        asked.append(broker.send("spawn", agent=CHILD, text=part, only=only, on_excess="narrow"))
    waiting = []
    for ident in asked:
        said = broker.answer(ident)
        waiting.append(said if "error" in said else broker.send("wait", run=said["ok"]["run"]))
    return [one if isinstance(one, dict) else broker.answer(one) for one in waiting]


def joined(parts: list[str], answers: list[dict[str, Any]]) -> dict[str, object]:
    """Join several answers into one; each source is listed once, in their order."""
    texts, sources = [], []
    for part, said in zip(parts, answers, strict=True):
        if "error" in said:
            texts.append(f"{part}\n  not answered: {said['error']['code']}: {said['error']['message']}")
            continue
        texts.append(f"{part}\n  " + said["ok"]["text"].replace("\n", "\n  "))
        sources += [one for one in said["ok"]["sources"] if one not in sources]
    return {"text": "\n".join(texts), "sources": sources}


def granted_roots() -> list[str]:
    """The directories that this agent's own manifest lets it read."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent.toml"), "rb") as file:
        manifest = tomllib.load(file)
    return list(manifest["permissions"]["filesystem"]["read"])


def main() -> None:
    """One JSON line in, one JSON line out."""
    intent = json.loads(sys.stdin.readline())
    parts = parts_of(intent["text"])
    if not parts:
        answer: dict[str, object] = {"text": "Ask something, for example: what is git and who wrote tar", "sources": []}
    else:
        try:
            broker = Broker(BROKER)
        except OSError:
            answer = {"text": "Nobody is here whom I could ask for a librarian: I have no broker.", "sources": []}
        else:
            answer = joined(parts, look_up(broker, parts, granted_roots()))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

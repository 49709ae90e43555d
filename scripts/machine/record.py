"""The record of set-up's additions, written before each addition, so that undo takes back exactly these.

The record is `.setup/added.json` in the clone. An entry is written before its act. After a crash between the two, undo
finds nothing to remove for the entry, which is harmless. The other order would forget a change.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

FOLDER = ".setup"
NAME = "added.json"


@dataclasses.dataclass
class Added:
    """Everything that set-up itself brought to this machine.

    `packages` are Debian packages that were not installed before, `upgraded` those whose version changed on
    the way ("name old new"; named by undo, never put back), `files` absolute paths outside the clone, `users`
    system users, `paths` paths relative to the clone.
    """

    packages: list[str] = dataclasses.field(default_factory=list)
    upgraded: list[str] = dataclasses.field(default_factory=list)
    files: list[str] = dataclasses.field(default_factory=list)
    users: list[str] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)


class Record:
    """The record of one clone."""

    def __init__(self, clone: pathlib.Path) -> None:
        self.path = clone / FOLDER / NAME
        self.added = Added()
        if self.path.exists():
            self.added = Added(**json.loads(self.path.read_text()))

    def add(self, kind: str, *values: str) -> None:
        """Write down `values` under `kind` (a field of Added) unless they stand there already."""
        known: list[str] = getattr(self.added, kind)
        new = [value for value in values if value not in known]
        if new:
            known.extend(new)
            self._write()

    def forget(self, kind: str, *values: str) -> None:
        """Strike out `values` after they were taken back."""
        known: list[str] = getattr(self.added, kind)
        known[:] = [value for value in known if value not in values]
        self._write()

    def _write(self) -> None:
        # Replaced in one step: a torn record would make undo forget what stands before the tear.
        self.path.parent.mkdir(exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(self.added), indent=1, sort_keys=True) + "\n")
        os.replace(temporary, self.path)

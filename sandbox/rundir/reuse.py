"""Reuse parts of a run's directory for the next run of the same policy, so that no files must be created for it.

A bundle and a copy of the artefacts are 20 files, nearly the same in every run of a policy. A file system without a
journal checks every recently removed file before it creates one (ext4, ``recently_deleted``). After many runs that cost
15 ms of CPU time a run.

A part changes owner by one rename, so only one of two competing runs gets it. Its content is not trusted: the new
owner writes it again, or reads and compares it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Final

# The directory below COVENANT_STATE.
SPARE: Final = "spare"
# The most parts kept, of all kinds together. With more concurrent runs the others create theirs as usual.
MOST: Final = 16
_GONE: Final = "gone-"


class Spares:
    """The parts in ``place`` that belong to one policy. A part that cannot be kept or taken is created anew."""

    def __init__(self, place: Path, policy_digest: str) -> None:
        self._place, self._digest = str(place), policy_digest

    def take(self, part: str, target: Path) -> bool:
        """Move a part to ``target``. Returns whether there was one."""
        for path in self.there(part):
            with contextlib.suppress(OSError):  # another run took it first
                os.rename(path, target)
                return True
        return False

    def there(self, part: str) -> list[str]:
        """Return the present paths of the parts of this kind."""
        prefix = f"{self._digest}.{part}."
        return [f"{self._place}/{name}" for name in _names(self._place) if name.startswith(prefix)]

    def give(self, part: str, source: Path) -> None:
        """Keep ``source`` for the next run, unless there are enough parts. Parts of other policies make room."""
        names = _names(self._place)
        if len(names) >= MOST:
            other = next((name for name in names if not name.startswith(self._digest)), None)
            if other is None:
                return
            _remove(self._place, other)
        with contextlib.suppress(OSError):
            if not names:
                os.makedirs(self._place, mode=0o700, exist_ok=True)
            os.rename(source, f"{self._place}/{self._digest}.{part}.{uuid.uuid4().hex}")


def sweep(place: Path) -> None:
    """Remove all parts: after a power cut their content is unknown."""
    for name in _names(str(place)):
        _remove(str(place), name)


def _names(place: str) -> list[str]:
    try:
        return os.listdir(place)
    except OSError:
        return []


def _remove(place: str, name: str) -> None:
    gone = f"{place}/{_GONE}{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        # Rename before the removal: a part that a run takes at the same time must not be emptied.
        os.rename(f"{place}/{name}", gone)
        shutil.rmtree(gone)

"""Parts of a run's directory that the next run of the same policy takes over, so that no files are made for it.

A bundle and a copy of the artefacts are 20 files, the same in every run of a policy but for what is written again. A
file system without a journal looks at every file that was removed lately before it makes one (ext4,
``recently_deleted``), which came to 15 ms of processor a run where many had ended.

A part changes hands by one rename: of two that want it one has it. Nothing is trusted to be as it was left: whoever
takes a part writes it again, or reads it and compares.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Final

# Where they lie below COVENANT_STATE.
SPARE: Final = "spare"
# So many parts are kept, whatever they are of. Runs beside each other that are more make theirs as ever.
MOST: Final = 16
_GONE: Final = "gone-"


class Spares:
    """The parts in ``place`` that belong to one policy. What cannot be kept or taken is made anew."""

    def __init__(self, place: Path, policy_digest: str) -> None:
        self._place, self._digest = str(place), policy_digest

    def take(self, part: str, target: Path) -> bool:
        """Whether there was one: then it is ``target`` now."""
        for path in self.there(part):
            with contextlib.suppress(OSError):  # another run took it first
                os.rename(path, target)
                return True
        return False

    def there(self, part: str) -> list[str]:
        """Where those of this kind lie now."""
        prefix = f"{self._digest}.{part}."
        return [f"{self._place}/{name}" for name in _names(self._place) if name.startswith(prefix)]

    def give(self, part: str, source: Path) -> None:
        """Keep ``source`` for the next, unless there are enough; those of other policies make room."""
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
    """Remove all that is kept: after a loss of power nobody knows what is in it."""
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
        # First out of everybody's reach: a part that a run has just taken is not emptied under it.
        os.rename(f"{place}/{name}", gone)
        shutil.rmtree(gone)

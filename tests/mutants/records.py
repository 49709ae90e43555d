"""Results on disk, so that an interrupted run goes on where it ended.

A file holds one JSON object a line: the mutant's key, the SHA-256 of its module's source, and the result. A kill counts
while the source of the module is the same. A survivor is tried again each time, since tests may have been added.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence

from tests.mutants import operators
from tests.mutants.run import Result


class Records:
    """The results of earlier runs in a file, to which each new result is appended."""

    def __init__(self, path: pathlib.Path, files: Mapping[str, pathlib.Path]) -> None:
        self.path = path
        self._sources = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
        self._lines = path.read_text().splitlines() if path.exists() else []

    def kills(self, sites: Sequence[operators.Site]) -> list[Result]:
        """Return the recorded kills of these sites whose module has not changed since."""
        by_key = {site.key: site for site in sites}
        found: dict[str, Result] = {}
        for line in self._lines:
            said = json.loads(line)
            site = by_key.get(said["key"])
            if site is None or said["source"] != self._sources[site.module]:
                continue
            result = Result(site, said["outcome"], said["tests"], said["seconds"])
            found.pop(site.key, None)
            if not result.survived:
                found[site.key] = result
        return list(found.values())

    def add(self, result: Result) -> None:
        """Append one result."""
        said = {
            "key": result.site.key,
            "source": self._sources[result.site.module],
            "outcome": result.outcome,
            "tests": result.tests,
            "seconds": round(result.seconds, 2),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(said) + "\n")

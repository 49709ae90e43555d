"""Check that CHANGELOG.md names the version that is released."""

from __future__ import annotations

import pathlib

from scripts.machine.console import SetupError

NAME = "CHANGELOG.md"
PENDING = "## Unreleased"


def check(clone: pathlib.Path, version: str) -> None:
    """Look at the first heading of a version, before anything is made.

    Raises:
        SetupError: it is another one, as before the changes since the last release got their version.
    """
    headings = [line.strip() for line in (clone / NAME).read_text().splitlines() if line.startswith("## ")]
    wanted = f"## {version}"
    if headings[:1] == [wanted]:
        return
    if headings[:1] == [PENDING]:
        raise SetupError(
            f"{NAME} still calls the changes of {version} `{PENDING}`",
            f"sed -i 's/^{PENDING}$/{wanted}/' {NAME}, then commit it, and tag that commit v{version}",
        )
    first = headings[0] if headings else "absent"
    raise SetupError(
        f"the first version of {NAME} is `{first}`, that of pyproject.toml `{version}`",
        f"write what changed under `{wanted}` in {NAME}, or set `version` in pyproject.toml",
    )

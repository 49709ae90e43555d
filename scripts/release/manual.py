"""Write the man pages of `covenant`, run by the tools' own Python: ``manual.py DIRECTORY VERSION``."""

from __future__ import annotations

import datetime
import os
import sys

from click_man.core import write_man_pages

from covenant.cli.main import cli


def main(directory: str, version: str) -> None:
    """Write a page for each command, dated by SOURCE_DATE_EPOCH."""
    day = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC)
    write_man_pages("covenant", cli, version=version, target_dir=directory, date=day.strftime("%Y-%m-%d"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""Write the man pages of `covenant`, run by the tools' own Python: ``manual.py DIRECTORY VERSION``."""

from __future__ import annotations

import datetime
import os
import sys

import click
from click_man.core import write_man_pages

from covenant.cli.main import cli


def main(directory: str, version: str) -> None:
    """Write a page for each command, dated by SOURCE_DATE_EPOCH."""
    # The group imports its verbs one by one; click-man asks for those that are there.
    context = click.Context(cli, info_name="covenant")
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    cli.commands = {name: command for name, command in found.items() if command is not None}
    day = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC)
    write_man_pages("covenant", cli, version=version, target_dir=directory, date=day.strftime("%Y-%m-%d"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""``covenant manifest import``: turn a configuration of another tool into an unsigned manifest, with its losses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from policy.importing.vocabulary import Imported

# As policy.importing.formats.NAMES, which costs an import: a test compares the two.
FORMATS = ("srt", "claude", "codex", "docker", "compose", "systemd", "tools-json")
_KINDS = (
    ("narrower", "narrower than before"),
    ("not_expressible", "no word for it in a manifest"),
    ("refused", "never granted"),
)


@click.command(
    "import",
    epilog=common.examples(
        "covenant manifest import --from systemd worker.service --out worker",
        "covenant manifest import --from srt settings.json --base /home/ann/site --home /home/ann",
    ),
)
@click.option("--from", "source", type=click.Choice(FORMATS), required=True, help="The tool that FILE configures.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Write DIR/agent.toml; DIR is new or empty."
)
@click.option("--id", "agent_id", metavar="ID", help="The agent's id; by default DIR's name, or `imported`.")
@click.option("--entry", metavar="PROGRAM", default="", help="The program, by its path or its name on PATH.")
@click.option("--base", metavar="DIR", default="", help="Where relative paths of FILE begin.")
@click.option("--home", metavar="DIR", default="", help="What `~` stands for in FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def import_(
    source: str,
    file: Path,
    out: Path | None,
    agent_id: str | None,
    entry: str,
    base: str,
    home: str,
    as_json: bool,
) -> None:
    """Turn FILE, a configuration of another tool, into an unsigned agent.toml that grants no more (- is stdin).

    The losses are what FILE allows and the manifest does not, with the line that would grant it. No value of a
    variable or secret is copied. docs/import.md says how each format is read.
    """
    from policy.importing import formats
    from policy.importing.vocabulary import Context

    name = agent_id or (out.absolute().name if out is not None else "imported")
    context = Context(name, entry, _absolute("--base", base), _absolute("--home", home))
    made = formats.read(source, _read(file), context)
    if out is not None:
        from covenant import scaffold
        from policy import package

        content = made.manifest_text.encode()
        scaffold.write(out, scaffold.Scaffold(name, {package.MANIFEST_NAME: (content, 0o644)}))
    if as_json:
        losses = [loss.to_json() for loss in made.losses]
        where = None if out is None else str(out)
        common.emit({"kind": "manifest_imported", "package": where, "manifest": made.manifest_text, "losses": losses})
        return
    if out is None:
        common.say(made.manifest_text.rstrip("\n"))
    else:
        shown = common.visible(str(out))
        common.say(f"made {shown}/agent.toml, which is not signed; then:")
        common.say(f"  covenant manifest check {shown}")
    _say_losses(made)


def _say_losses(made: Imported) -> None:
    """Print the losses to stderr, by kind."""
    for kind, title in _KINDS:
        mine = [loss for loss in made.losses if loss.kind == kind]
        if mine:
            common.say(f"{title} ({len(mine)}):", err=True)
        for loss in mine:
            where = f"{common.visible(loss.place)}: " if loss.place else ""
            common.say(f"  {where}{common.visible(loss.message)}", err=True)
            if loss.line:
                common.say(f"    to grant it: {common.visible(loss.line)}", err=True)


def _absolute(option: str, value: str) -> str:
    """Return a directory without its last slash, as the text that it is: nothing is looked up."""
    if not value:
        return ""
    if not value.startswith("/") or os.path.normpath(value) != value.rstrip("/"):
        hint = "write it out from /, without `.` and `..`"
        raise errors.UsageError(f"{option} `{common.visible(value)}` is no absolute path", hint=hint)
    return value.rstrip("/")


def _read(file: Path) -> bytes:
    """Return the bytes of the source, one more than are accepted at most."""
    from policy.importing.vocabulary import MAX_BYTES

    if str(file) == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as e:
        shown = common.visible(str(file))
        raise errors.UsageError(f"`{shown}` cannot be read: {e.strerror}", hint="give a file, or - for stdin") from e

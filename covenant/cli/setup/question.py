"""The question of ``covenant setup`` at a terminal: it lists what changes on this host before anything does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from covenant.cli import common, terminal
from covenant.cli.setup import files

# More files of one directory than this are one line: there is a manual page of each verb.
_LISTED = 8
_RUNS_END = "runs end, unless config.toml has on_supervisor_exit = 'continue'"


def ask(lines: Sequence[str], question: str) -> None:
    """Print the lines on stderr and ask, if stdin and stdout are a terminal. Without one nothing is asked.

    Raises:
        click.Abort: the answer is not yes.
    """
    if not terminal.on_terminal():
        return
    for line in lines:
        common.say(common.visible(line), err=True)
    common.confirmed(question)


def installing(parts: Sequence[files.Part], gone: Sequence[str], root: Path, *, again: bool) -> Iterator[str]:
    """Yield what an installation changes. ``gone`` are files of an earlier one that this one does not have."""
    new, other = [], []
    for part in parts:
        if not (root / part.place).is_symlink() and not (root / part.place).exists():
            new.append(part.place)
        elif part.place in files.CONFIGURATION:
            yield f"keeps     /{part.place}"
        elif not part.same(root):
            other.append(part.place)
    yield from _listed("writes", new)
    yield from _listed("replaces", other)
    yield from _listed("removes", gone)
    yield f"makes     if they lack: users {_made('sysusers', 'u')}; directories {_made('tmpfiles', 'd')}"
    if again:
        yield f"restarts  services of Covenant that are active; {_RUNS_END}"
    yield "starts    covenant-supervisor.socket, now and at each boot"


def removing(taken: Sequence[str], kept: Sequence[str]) -> Iterator[str]:
    """Yield what a removal changes."""
    yield f"stops     services of Covenant, now and at each boot; {_RUNS_END}"
    yield from _listed("removes", taken)
    for place in kept:
        yield f"keeps     /{place}, which was changed"
    yield f"keeps     users {_made('sysusers', 'u')}; directories {_made('tmpfiles', 'd')}"


def _listed(act: str, places: Sequence[str]) -> Iterator[str]:
    counts = Counter(str(PurePosixPath(place).parent) for place in places)
    for parent, count in counts.items():
        if count > _LISTED:
            yield f"{act:<9} /{parent}/ ({count} files)"
            continue
        for place in places:
            if str(PurePosixPath(place).parent) == parent:
                yield f"{act:<9} /{place}"


def _made(name: str, kind: str) -> str:
    """Return the names in a table of systemd-sysusers or systemd-tmpfiles."""
    rows = (line.split() for line in (files.data() / "system" / f"{name}.conf").read_text().splitlines())
    return ", ".join(row[1] for row in rows if row[:1] == [kind])

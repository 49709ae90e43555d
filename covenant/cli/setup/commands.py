"""``covenant setup``: lay the system parts of a wheel's installation, look at them, and take them away."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click

from covenant.cli import common
from covenant.cli.setup import files, question
from policy import errors

# Which files were laid, each with its digest: what is not named there belongs to another installation.
RECORD = "var/lib/covenant-setup.json"


@click.command(
    epilog=common.examples(
        "sudo env PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin pipx install ./covenant_supervisor-0.1.0-*.whl",
        "sudo covenant setup",
        "sudo covenant setup --check",
        "covenant setup --root /tmp/tree",
    )
)
@click.option("--check", is_flag=True, help="Compare what is there with what would be laid. Status 3: it differs.")
@click.option("--remove", is_flag=True, help="Stop the services and take the parts away. Users and state stay.")
@click.option(
    "--root", type=click.Path(path_type=Path), help="Lay a tree below this directory, and touch nothing else."
)
@click.option("--prefix", metavar="DIR", help="The environment that commands and units name.  [default: this one]")
@click.option("--yes", is_flag=True, help="Do not ask before this host is changed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; asks nothing.")
@click.pass_context
def setup(
    ctx: click.Context, check: bool, remove: bool, root: Path | None, prefix: str | None, yes: bool, as_json: bool
) -> None:
    """Lay the parts of an installation outside its Python environment, as the packages do.

    Users, units, configuration, directories of state, commands in /usr/bin, completion and manual pages. The
    supervisor's socket is enabled and started; the daemon is not. A configuration that is there is kept. At a terminal
    it lists what it changes and asks first.
    """
    if check and remove:
        raise errors.UsageError("--check and --remove exclude each other")
    place = Path("/") if root is None else root.absolute()
    if place.exists() and place != Path("/") and place.stat().st_uid != os.geteuid():
        hint = "name a directory of your own"
        raise errors.UsageError(f"`{place}` is another user's", hint=hint, where=str(place))
    parts = [] if remove else list(files.parts(prefix or sys.prefix, metadata.version("covenant-supervisor")))
    if check:
        wrong = [f"/{part.place}" for part in parts if not _holds(part, place)]
        _say("setup_checked", wrong, as_json, done=f"all {len(parts)} parts are there", many="differ or lack")
        ctx.exit(common.EXIT_NO if wrong else 0)
    if root is None:
        _is_root()
    live, asks = root is None, root is None and not yes and not as_json
    try:
        if remove:
            taken, kept = _remove(place, live=live, asks=asks)
            _say("setup_removed", taken, as_json, done="nothing was laid here", many="removed", kept=kept)
            return
        if live:
            _is_safe(Path(prefix or sys.prefix))
        _lay(parts, place, live=live, asks=asks)
    except OSError as e:
        hint = "mend it, then repeat: what was laid is replaced"
        raise errors.UsageError(f"setup failed: {e.strerror}", hint=hint, where=str(e.filename)) from e
    _say("setup_laid", [f"/{part.place}" for part in parts], as_json, done="", many="laid")


def _holds(part: files.Part, root: Path) -> bool:
    return part.same(root) or (part.place in files.CONFIGURATION and (root / part.place).is_file())


def _is_root() -> None:
    if os.geteuid() != 0:
        raise errors.UsageError(
            "setup changes /usr/lib, /etc and systemd, which is root's",
            hint="repeat with sudo; or look at the parts first: covenant setup --root DIR",
        )


def _is_safe(prefix: Path) -> None:
    """Refuse an environment whose code another user could change: root would run it.

    The daemon's user must reach it as well.
    """
    for path in (prefix, *prefix.parents, prefix / "bin", Path(files.__file__).parent):
        if why := files.fault(path, path.stat()):
            hint = "sudo env PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin pipx install WHEEL, then repeat"
            raise errors.UsageError(f"this environment is not for services: {why}", hint=hint, where=str(prefix))


def _lay(parts: list[files.Part], root: Path, *, live: bool, asks: bool) -> None:
    known = _record(root)
    _check_foreign(parts, known, root)
    gone = sorted(set(known) - {part.place for part in parts})
    again = bool(known)
    if asks:
        question.ask(list(question.installing(parts, gone, root, again=again)), "Change this host?")
    if live and again:
        step("preremove", "upgrade")
    made: dict[str, str] = {}
    # INVARIANT: the record is written first: what a kill leaves is ours, and the next call replaces or removes it.
    for part in parts:
        made[part.place] = hashlib.sha256(part.content or part.target.encode()).hexdigest()
    _write_record(root, {**known, **made})
    for part in parts:
        if part.place in files.CONFIGURATION and (root / part.place).exists():
            continue
        part.lay(root)
    for place in gone:
        (root / place).unlink(missing_ok=True)
    _write_record(root, made)
    if live:
        step("postinstall", "configure", *(["again"] if again else []))


def _check_foreign(parts: list[files.Part], known: dict[str, str], root: Path) -> None:
    for part in parts:
        path = root / part.place
        foreign = os.path.lexists(path) and part.place not in known and not part.same(root)
        if foreign and part.place not in files.CONFIGURATION:
            raise errors.UsageError(
                f"`{path}` belongs to another installation",
                hint="remove that one first: apt-get remove covenant",
                where=str(path),
            )


def _remove(root: Path, *, live: bool, asks: bool) -> tuple[list[str], list[str]]:
    """Take away what the record names. A configuration that was changed is kept."""
    known = _record(root)
    there = [place for place in sorted(known) if os.path.lexists(root / place)]
    kept = [place for place in there if place in files.CONFIGURATION and _digest(root / place) != known[place]]
    taken = [place for place in there if place not in kept]
    if known and asks:
        question.ask(list(question.removing(taken, kept)), "Remove this installation?")
    if live and known:
        step("preremove", "remove")
    for place in taken:
        (root / place).unlink()
    (root / RECORD).unlink(missing_ok=True)
    if live and known:
        step("postremove", "remove")
    return [f"/{place}" for place in taken], [f"/{place}" for place in kept]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _record(root: Path) -> dict[str, str]:
    try:
        found = json.loads((root / RECORD).read_text())["files"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise errors.UsageError(
            "the record of an earlier setup is damaged", hint="delete it if no part is left", where=str(root / RECORD)
        ) from None
    if any(place.startswith("/") or ".." in Path(place).parts for place in found):
        raise errors.UsageError("the record of an earlier setup names other places", where=str(root / RECORD))
    return {str(place): str(digest) for place, digest in found.items()}


def _write_record(root: Path, made: dict[str, str]) -> None:
    files.Part(RECORD, json.dumps({"files": made}, indent=1, sort_keys=True).encode() + b"\n").lay(root)


def step(name: str, *words: str) -> None:
    """Run a step of the packages: users, directories, units."""
    done = subprocess.run(
        ["/bin/sh", str(files.data() / "scripts" / f"{name}.sh"), *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise errors.UsageError(f"the step {name} failed: {done.stderr.strip()[-500:]}", hint="mend it, then repeat")


def _say(kind: str, places: list[str], as_json: bool, *, done: str, many: str, kept: list[str] | None = None) -> None:
    if as_json:
        common.emit({"kind": kind, "parts": places, **({} if kept is None else {"kept": kept})})
        return
    for place in places:
        common.say(common.visible(place))
    for place in kept or []:
        common.say(f"kept, since it was changed: {common.visible(place)}")
    common.say(f"{len(places)} parts {many}" if places else done)

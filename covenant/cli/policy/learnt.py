"""Write and show the outcome of learning: the shared end of ``covenant learn`` and ``covenant run --learn``."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from covenant.cli import common
from policy import errors
from policy.package import MANIFEST_NAME

if TYPE_CHECKING:
    from policy.learn.ceiling import Ceiling
    from policy.learn.observed import Observed
    from policy.learn.propose import LearntProposal, LeftOut

EVIDENCE: Final = "evidence.json"
# Refusals that are shown; all of them are in the evidence.
_SHOWN: Final = 12
# A path that was asked for and is only of the root's own business: libraries and programs that are looked for.
_OF_THE_ROOT: Final = (
    *("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc/ld.so.cache"),
    *("/proc", "/sys", "/dev", "/tmp"),  # noqa: S108 - the sandbox's own
)


def check_new(target: Path) -> None:
    """Check that the package can be written, before anything runs.

    Raises:
        errors.PackageError: there is something at its place.
    """
    if os.path.lexists(target) and (not target.is_dir() or target.is_symlink() or any(target.iterdir())):
        raise errors.PackageError(
            f"`{target}` is not empty", hint="give another directory: nothing is ever overwritten", where=str(target)
        )


def count_changes(place: str, seen: Observed) -> None:
    """Count the changes of the workspace: directories, links and removals are no opens."""
    from covenant.cli.operator import workspace_client
    from policy.learn.observed import SeenAccess

    with contextlib.suppress(errors.WorkspaceError):  # nothing was changed
        workspace_client.find(seen.run_id, here=True)
        answer = workspace_client.ask("diff", here=True, run=seen.run_id, paths=())
        for change in workspace_client.changes(answer["changes"]):
            seen.saw(SeenAccess("look", f"{place}/{change.path}", "", time.time_ns(), writes=True))


class Proposed(NamedTuple):
    """A proposal. ``links`` maps places of the root to the files that they lead to, ``used`` has numbers of layers.

    ``trees`` are the layers of programs.
    """

    found: LearntProposal
    links: dict[str, str]
    used: frozenset[int]
    trees: dict[str, str]


def proposed(
    seen: Observed,
    ceiling: Ceiling,
    layers: Sequence[str],
    beyond: str,
    *,
    of_host: bool = False,
) -> Proposed:
    """Return what a run that was seen needs of its ceiling, whose root has these layers, the lowest first.

    ``beyond`` says how the ceiling is widened. With ``of_host`` the root has the host's programs at their own places,
    below the layers.
    """
    from covenant.session import learning
    from policy.layers import parse_ref
    from policy.learn import propose

    started = [path for path, _ in seen.succeeded("exec")]
    with contextlib.ExitStack() as held:
        root = learning.Root(common.state(), [parse_ref(one) for one in layers], held)
        scripts = root.interpreters(started, ceiling)
        loaded = [path for path, _ in seen.succeeded("load")]
        paths = (*started, *scripts.values(), *loaded, *ceiling.named)
        links = {path: os.path.realpath(path) for path in paths} if of_host else {}
        links |= root.links(paths)
        trees = root.trees(paths)
        ceiling = structs.replace(ceiling, strange=_strange(ceiling, paths, links, trees))
        found = propose.propose(seen, ceiling, links, scripts)
        used = root.used(found.used)
    left = (*found.left_out, *_asked_in_vain(seen, ceiling.never, beyond))
    return Proposed(structs.replace(found, left_out=left), links, used, trees)


def _strange(
    ceiling: Ceiling, paths: Iterable[str], links: Mapping[str, str], trees: Mapping[str, str]
) -> frozenset[str]:
    """Return the programs that the ceiling does not start: a path that was seen can be one that the agent made up."""
    from policy.manifest import process

    if process.ROOT_TREE in ceiling.trees:
        return frozenset()
    named = {links.get(path, path) for path in ceiling.named}
    held = named | {links.get(path, path) for path in paths if trees.get(path) in ceiling.trees}
    return frozenset(links.get(path, path) for path in paths) - held


def _asked_in_vain(seen: Observed, never: Mapping[str, str], beyond: str) -> tuple[LeftOut, ...]:
    """Return the paths of this host that the run asked for in vain. ``beyond`` says how the ceiling is widened."""
    from policy.learn import presets
    from policy.learn.ceiling import below
    from policy.learn.propose import LeftOut

    out = []
    for path, one in seen.failed(errno.ENOENT):
        if any(below(path, own) for own in _OF_THE_ROOT) or not os.path.lexists(path):
            continue
        tree = next((tree for tree in never if tree != "/" and below(path, tree)), None)
        why = f"beyond the ceiling: {beyond}"
        if tree is not None:
            why = f"never granted: {never[tree]}"
        elif presets.is_sensitive(path):
            why = "sensitive, and beyond the ceiling"
        out.append(LeftOut(path, why, one.count, one.first_ns, one.by))
    return tuple(out)


def write(
    target: Path,
    manifest: str,
    found: LearntProposal,
    facts: Mapping[str, Any],
    files: Mapping[str, tuple[bytes, int]] | None = None,
    links: Mapping[str, str] | None = None,
) -> None:
    """Write the package: the manifest, its evidence, ``files`` with their modes, and ``links``.

    Raises:
        errors.PackageError: it cannot be written.
    """
    from covenant import scaffold
    from covenant.session import learning

    evidence = learning.document(found, {**facts, "at_ms": int(time.time() * 1000)})
    made = {**(files or {}), MANIFEST_NAME: (manifest.encode(), 0o644), EVIDENCE: (evidence, 0o644)}
    scaffold.write(target, scaffold.Scaffold("learnt", made, links=links or {}))


def report(
    target: Path, found: LearntProposal, seen: Observed, status: int, *, quiet: bool, taken_out: Sequence[str] = ()
) -> None:
    """Say on stderr what was learnt, what was left out, and what comes next."""
    from covenant.cli.operator import trust_update_steps
    from covenant.session import learning

    if not quiet:
        nothing = " nothing of the ceiling was used" if not (found.lines or taken_out or found.left_out) else ""
        common.say(f"learnt:{nothing}", err=True)
        for line in found.lines:
            common.say(f"  {line.key} {common.visible(line.value)}: {learning.evidence(line)}", err=True)
        for text in taken_out:
            common.say(f"  taken out: {common.visible(text)}", err=True)
        for one in found.left_out[:_SHOWN]:
            common.say(f"  left out: {common.visible(one.what)}: {one.why}", err=True)
        if len(found.left_out) > _SHOWN:
            common.say(f"  left out: {len(found.left_out) - _SHOWN} more, in {EVIDENCE}", err=True)
    if seen.missed:
        common.say(f"note: {seen.missed} events were not kept, so that a line may be missing", err=True)
    if status:
        common.say(f"note: the run ended with status {status}: only what it did until then is learnt", err=True)
    place = common.visible(shlex.quote(str(target)))
    run = f"covenant run {place}{'' if found.workspace is None else ' --workspace DIR'}"
    steps = trust_update_steps.until_it_runs(place, run)
    common.say(f"written: {place}, unsigned; {steps}", err=True)

"""``covenant run --learn``: observe a run of a package, and write the package that grants only what the run used."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from covenant.cli import common
from covenant.cli.policy import learnt
from policy import errors
from policy.package import MANIFEST_NAME, Package

if TYPE_CHECKING:
    from policy.learn.narrow import NarrowedManifest
    from policy.learn.observed import Observed
    from policy.learn.propose import LearntProposal
    from policy.manifest.agent import Manifest

_BEYOND = "the manifest does not grant it"


def run_and_learn(
    source: Path, target: Path, workspace: Path | None, run: Callable[[Observed], int], *, quiet: bool
) -> int:
    """Call ``run`` with what collects its accesses, and write the narrowed package. Returns the run's status.

    Raises:
        errors.CovenantError: the package cannot be observed, changed meanwhile, or there is something at ``target``.
    """
    from policy import decide
    from policy.learn.observed import Observed
    from sandbox.storage import package_reader

    learnt.check_new(target)
    package = package_reader.read(source)
    manifest = decide.manifest_of(package)
    _check_observable(manifest)
    seen = Observed()
    status = run(seen)
    if not seen.run_id:  # it was refused, and says why
        return status
    # INVARIANT: only the package that was run is verified. Another one would be written down with its evidence.
    if seen.package_digest != package.digest:
        raise errors.PackageError(
            f"`{source}` changed before it was started", hint="run it again: nothing was written", where=str(source)
        )
    if workspace is not None:
        learnt.count_changes(manifest.workspace.path, seen)
    done, found = _narrowed(package, manifest, seen, workspace)
    facts = {"package": package.digest, "run": seen.run_id, "missed": seen.missed}
    learnt.write(target, done.text, found, facts, _files(source, package), package.links)
    gone = [f"{one.key}: {one.value}" for one in done.taken_out]
    learnt.report(target, found, seen, status, quiet=quiet, taken_out=gone)
    return status


def _check_observable(manifest: Manifest) -> None:
    """Check that all the agent does is seen.

    Raises:
        errors.UsageError: it has no sandbox, or children, which are runs of their own.
    """
    if manifest.sandbox.backend != "linux-gvisor":
        raise errors.UsageError(
            f'--learn observes a sandbox, and backend = "{manifest.sandbox.backend}" has none',
            hint='use backend = "linux-gvisor"',
        )
    if manifest.spawn.allowed:
        raise errors.UsageError(
            "--learn does not observe children, whose grants the agent's must hold",
            hint="learn each child by a run of its own, and narrow this manifest by hand",
        )


def _narrowed(
    package: Package, manifest: Manifest, seen: Observed, workspace: Path | None
) -> tuple[NarrowedManifest, LearntProposal]:
    """Return the manifest with what was seen alone, and the proposal with the evidence.

    Raises:
        errors.InternalError: it would be wider than before.
    """
    from covenant.session import learning
    from policy.learn import narrow
    from policy.learn.ceiling import HostPlace
    from sandbox import config
    from sandbox.host import facts

    never = facts.never_granted(config.load(common.state()), (str(common.home()),))
    place = None if workspace is None else HostPlace(os.path.realpath(workspace), manifest.workspace.path)
    ceiling = learning.with_facts(narrow.ceiling(manifest, never, place), seen)
    of_host = manifest.root.base == "closure"
    layers = (*(() if of_host else (manifest.root.base,)), *manifest.root.layers)
    found, links, _, trees = learnt.proposed(seen, ceiling, layers, _BEYOND, of_host=of_host)
    said = {line: learning.evidence(line) for line in found.lines}
    done = narrow.narrowed(package.manifest.decode(), manifest, found, links, said)
    if not _is_within(done.text, manifest, trees):
        raise errors.InternalError("what was learnt is wider than the manifest")
    return done, found


def _is_within(text: str, before: Manifest, trees: Mapping[str, str]) -> bool:
    from policy import data
    from policy.learn import narrow
    from policy.manifest import parse
    from policy.rules import nine

    mine, top = (nine.requested(one, roles=data.roles()) for one in (parse.parse(text.encode()), before))
    if not narrow.starts_no_more(mine.executables, top.executables, trees):
        return False
    # A list of programs is below the tree that has them, which the order of grants does not know.
    return dataclasses.replace(mine, executables=top.executables).is_subset(top)


def _files(source: Path, package: Package) -> dict[str, tuple[bytes, int]]:
    """Return the other files of the package, with who may start them."""
    files = {path: data for path, data in package.files.items() if path != MANIFEST_NAME}
    return {path: (data, 0o755 if os.access(source / path, os.X_OK) else 0o644) for path, data in files.items()}

"""Paths that no manifest is granted, with any signature: part of rule 1.

Asked twice with one table: about the path as the manifest writes it, and by the sandbox about the path as the host
resolves it. Pure: COVENANT_HOME, COVENANT_STATE and the supervisor's own code come as ``extra``.
"""

from __future__ import annotations

from collections.abc import Mapping

from policy import errors
from policy.data.types import NeverGrantable
from policy.manifest import text

_NOTHING: Mapping[str, str] = {}


def check(
    path: str,
    table: NeverGrantable,
    extra: Mapping[str, str] = _NOTHING,
    *,
    write: bool = False,
    grant: str = "",
    where: str = "",
) -> None:
    """Refuse a path that lies in a never-grantable tree, or contains one.

    ``path`` is absolute and normalised; ``extra`` maps further trees of this host to their reasons; ``write`` asks
    for the trees that may be read and not written as well; ``grant`` and ``where`` stand in the error.

    Raises:
        errors.NeverGrantableError: it does.
    """
    error = refusal(path, table, extra, write=write)
    if error is not None:
        error.grant, error.where = grant, where
        raise error


def refusal(
    path: str, table: NeverGrantable, extra: Mapping[str, str] = _NOTHING, *, write: bool = False
) -> errors.NeverGrantableError | None:
    """Return the error of ``check``, for a caller whose place costs a scan of the file; None when there is none."""
    for trees in (extra, table.trees, table.write_trees if write else _NOTHING):
        tree = find(path, trees)
        if tree is not None:
            return _error(path, tree, trees[tree])
    return None


def find(path: str, trees: Mapping[str, str]) -> str | None:
    """The tree that ``path`` lies in, or that lies in ``path``; None when there is none. ``/`` is only itself."""
    if path in trees:
        return path
    below = path if path.endswith("/") else f"{path}/"
    return next((t for t in trees if t != "/" and (path.startswith(f"{t}/") or t.startswith(below))), None)


def _error(path: str, tree: str, reason: str) -> errors.NeverGrantableError:
    shown = text.quote(path)
    if path == tree:
        return errors.NeverGrantableError(f"path {shown} is never granted: {reason}", hint=_AWAY)
    inside = path.startswith(f"{tree}/")
    relation, hint = ("lies in", _AWAY) if inside else ("contains", "name what is needed in it")
    return errors.NeverGrantableError(
        f"path {shown} {relation} {text.quote(tree)}, which is never granted: {reason}", hint=hint
    )


_AWAY = "take it out of the manifest"

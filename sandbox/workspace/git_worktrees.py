"""Find the branches that other worktrees of a repository have checked out, as the caller (policy.workspace.git).

git itself moves no such branch: the files of the other worktree would be those of another commit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from policy.workspace import git
from sandbox.workspace import lower, upper
from sandbox.workspace.lower import Tops

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BRANCHES: Final = "refs/heads/"
_MOST: Final = 4096
# References that name one another are followed so often.
_STEPS: Final = 5


def held(top: Tops, directory: str, worktree: str | None, is_bare: Callable[[str], bool]) -> dict[str, str]:
    """Return the references below a directory of git that other worktrees have checked out, each with the refusal.

    ``worktree`` is the name of the linked worktree that is the workspace, None for the main one. ``is_bare`` says of
    the path of a configuration whether its repository has no files of its own.
    """
    heads = {"": f"{directory}/HEAD"} if worktree is not None and not is_bare(f"{directory}/config") else {}
    heads |= {name: f"{directory}/worktrees/{name}/HEAD" for name in _names(top, f"{directory}/worktrees")}
    found: dict[str, str] = {}
    for name, head in heads.items():
        reference = git.target(read(top, head)) if name != worktree else ""
        for _ in range(_STEPS):
            if not reference.startswith(_BRANCHES):
                break
            found.setdefault(f"{directory}/{reference}", git.held_refusal(name))
            reference = git.target(read(top, f"{directory}/{reference}"))
    return found


def _names(top: Tops, path: str) -> list[str]:
    fd = lower.opened(top, path)
    if fd is None:
        return []
    try:
        return sorted(filter(upper.is_text, os.listdir(fd)))
    finally:
        os.close(fd)


def read(top: Tops, path: str) -> bytes:
    """Return the beginning of a file of a directory. Empty where there is none, or a directory of that name."""
    above, _, name = path.rpartition("/")
    directory = lower.opened(top, above)
    if directory is None:
        return b""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, directory)
        try:
            fd = os.open(name, _FILE, dir_fd=directory)
            stack.callback(os.close, fd)
            return os.read(fd, _MOST)
        except OSError:
            return b""

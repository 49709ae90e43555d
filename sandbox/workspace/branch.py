"""The changes of a workspace as one commit on a new branch of the caller's repository. Its files and index stay.

All of it is done by git with the caller's rights. The configuration that git reads is the host's own:
a workspace cannot change it. No hook and no filter runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from policy.workspace.changes import Change

GIT: Final = "/usr/bin/git"
_QUIET: Final = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0")
_GONE: Final = "0" * 40
_MODES: Final = {True: "100755", False: "100644"}
_SECONDS: Final = 600
_NO_COMMIT: Final = "the repository has no commit that a branch could begin at"
_EXISTS: Final = "there is a branch"
# The fixes for errors of ``commit``, by words of the error.
_FIXES: Final = {
    _NO_COMMIT: "make a first commit in the directory",
    _EXISTS: "give another name",
    "not a git repository": "covenant workspace apply; a branch needs a repository with a commit",
    "is not a valid branch name": "give a name such as agent/fix",
}


class _Repository:
    """The repository of a directory, with an index of its own in ``scratch``. ``upper`` is the open upper layer."""

    def __init__(self, directory: str, scratch: str, upper: int) -> None:
        self._directory = directory
        self._upper = upper
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": _home(),
            "LC_ALL": "C.UTF-8",
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_TERMINAL_PROMPT": "0",
        }

    def git(
        self,
        *words: str,
        data: bytes = b"",
        accepted: Sequence[int] = (0,),
        variables: Mapping[str, str] = types.MappingProxyType({}),
    ) -> bytes:
        """Run git. Returns its stdout.

        Raises:
            OSError: it failed; the message is git's last line.
        """
        done = subprocess.run(
            [GIT, *_QUIET, "-C", self._directory, *words],
            env={**self._environment, **variables},
            input=data,
            capture_output=True,
            timeout=_SECONDS,
            pass_fds=[self._upper],
            check=False,
        )
        if done.returncode not in accepted:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise OSError(0, f"git: {lines[-1][:300] if lines else 'no message'}")
        return done.stdout

    def ignored(self, paths: Iterable[str]) -> set[str]:
        """Return those of the paths that git ignores and does not have."""
        raw = "\0".join(paths).encode()
        # 1: none is ignored.
        said = self.git("check-ignore", "-z", "--stdin", data=raw, accepted=(0, 1))
        return set(said.decode().split("\0")) - {""}

    def blobs(self, changes: Sequence[Change]) -> dict[str, str]:
        """Put the content of each file and link into the repository. Returns the object of each path."""
        files = [one.path for one in changes if one.kind == "file"]
        raw = "".join(f"/proc/self/fd/{self._upper}/{path}\n" for path in files).encode()
        named = self.git("hash-object", "-w", "--no-filters", "--stdin-paths", data=raw).decode().split()
        found = dict(zip(files, named, strict=True))
        for one in changes:
            if one.kind == "link":
                found[one.path] = self.git("hash-object", "-w", "--stdin", data=one.target.encode()).decode().strip()
        return found


def _home() -> str:
    """Return the home of the user that this process is: git reads its configuration there."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/nonexistent"


@contextlib.contextmanager
def scratch(uid: int, gid: int) -> Iterator[str]:
    """Make a directory for a user's index. It is gone afterwards, also when the user's process was killed.

    Raises:
        OSError: it could not be made.
    """
    made = tempfile.mkdtemp(prefix="covenant-branch-")
    try:
        os.chown(made, uid, gid)
        yield made
    finally:
        # The user may have put links in it. TemporaryDirectory would change modes behind them (CVE-2023-6597).
        shutil.rmtree(made, ignore_errors=True)


def fix(message: str) -> str:
    """Return the fix for an error of ``commit``; the empty string if only git knows one."""
    return next((hint for words, hint in _FIXES.items() if words in message), "")


def commit(
    directory: str, index: str, upper: int, changes: Sequence[Change], name: str, author: str, message: str
) -> str:
    """Commit changes on a new branch of the repository that has the directory. Returns the commit.

    ``index`` is an empty directory for the new index (`scratch`).

    Raises:
        OSError: there is no repository or no commit yet, the branch exists, or git failed.
    """
    one = _Repository(directory, index, upper)
    one.git("check-ref-format", "--branch", name)
    prefix = one.git("rev-parse", "--show-prefix").decode().rstrip("\n")
    if not one.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}", accepted=(0, 1)):
        raise OSError(0, _NO_COMMIT)
    if one.git("rev-parse", "--verify", "--quiet", f"refs/heads/{name}", accepted=(0, 1)):
        raise OSError(0, f"{_EXISTS} `{name}` already")
    head = one.git("rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    one.git("read-tree", head)
    chosen = _tracked(one, changes)
    blobs = one.blobs([change for change in chosen if change.action != "delete"])
    lines = "".join(_line(change, blobs, prefix) for change in chosen)
    one.git("update-index", "-z", "--index-info", data=lines.encode())
    tree = one.git("write-tree").decode().strip()
    who = {"NAME": author, "EMAIL": "agent@covenant.invalid"}
    names = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    made = one.git("commit-tree", tree, "-p", head, "-m", message, variables=names).decode().strip()
    one.git("update-ref", f"refs/heads/{name}", made, _GONE)
    return made


def _tracked(one: _Repository, changes: Sequence[Change]) -> list[Change]:
    """Return the files and links that git would have: none of its own, and none that it ignores."""
    found = [
        change
        for change in changes
        if change.kind in ("file", "link") and ".git" not in Path(change.path).parts and "\n" not in change.path
    ]
    ignored = one.ignored(change.path for change in found if change.action == "add")
    return [change for change in found if change.path not in ignored]


def _line(change: Change, blobs: dict[str, str], prefix: str) -> str:
    """Return a line of `git update-index --index-info`."""
    path = f"{prefix}{change.path}"
    if change.action == "delete":
        return f"0 {_GONE}\t{path}\0"
    mode = "120000" if change.kind == "link" else _MODES[bool(change.mode & 0o100)]
    return f"{mode} {blobs[change.path]}\t{path}\0"

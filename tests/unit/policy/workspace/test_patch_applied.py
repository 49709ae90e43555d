"""A patch of a workspace is one that the real ``git apply`` takes, and it makes the same tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

from policy.workspace import unified
from policy.workspace.changes import Action, Change, Kind
from policy.workspace.entries import LowerEntry

# Path: the two contents; None is no file, and text a link.
FILES: dict[str, tuple[bytes | str | None, bytes | str | None]] = {
    "one": (b"a\n", b"a\nb\n"),
    "no end": (b"a", b"a\nb"),
    "end comes": (b"a", b"a\n"),
    "end goes": (b"a\n", b"a"),
    "new": (None, b"x\n"),
    "made/without/end": (None, b"\tx"),
    'with "quotes" and \\': (b"q\n", b"r\n"),
    "tab\tand\x1b": (None, b"t\n"),
    "\u00e9 and \u202e": (b"e\n", b"f\n"),
    "empty": (None, b""),
    "filled": (b"", b"x\n"),
    "emptied": (b"x\n", b""),
    "removed": (b"x\ny", None),
    "removed empty": (b"", None),
    "old name": (b"same\n" * 9, None),
    "sub/new name": (None, b"same\n" * 9),
    "ends": (b"a\r\nb\rc\x0cd\x1b[2J\n", b"a\r\nb\rc\x0ce\x1b[2J\n"),
    "signs": (b"-- a\n++ b\n", b"++ b\n@@ -1 +1 @@\n"),
    "far": (b"".join(b"%d\n" % n for n in range(60)), b"".join(b"%d\n" % n for n in range(60) if n not in (3, 50))),
    "link": (None, "no end"),
    "moved link": ("no end", "one"),
    "gone link": ("one", None),
}


def _put(root: Path, side: int) -> None:
    for path, contents in FILES.items():
        content, place = contents[side], root / path
        if content is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                place.symlink_to(content)
            else:
                place.write_bytes(content)


def _tree(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): path.readlink() if path.is_symlink() else (path.read_bytes(), _starts(path))
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def _starts(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o100)


def _changes(before: Path, after: Path) -> str:
    old, new, found = _tree(before), _tree(after), []
    for path in sorted(old.keys() | new.keys()):
        one = (after if path in new else before) / path
        texts = [root / path for root in (before, after)]
        old_text, new_text = (text.read_bytes() if text.is_file() else b"" for text in texts)
        linked = one.is_symlink()
        base = None
        if path in old:
            mode = 0o777 if linked else texts[0].stat().st_mode & 0o777
            was = str(texts[0].readlink()) if linked else ""
            base = LowerEntry(path, "link" if linked else "file", mode, len(old_text), target=was)
        action: Action = "add" if path not in old else "delete" if path not in new else "modify"
        target = str(one.readlink()) if linked else ""
        mode = one.lstat().st_mode & 0o777
        kind: Kind = "link" if linked else "file"
        size = len(old_text if action == "delete" else new_text)
        change = Change(path, action, kind, mode, size, "", target, base)
        found += list(unified.patch(change, old_text, new_text))
    made = [
        Change("made", "add", "dir", 0o755),
        Change("secret", "add", "file", refused="protected", size=2),
        Change("a/.git/HEAD", "add", "file", size=2),
        Change("large", "add", "file", size=9),
    ]
    for one_more in made:
        found += unified.patch(one_more, b"", b"s\n")
    return "".join(f"{line}\n" for line in found)


def test_git_applies_patch_to_same_tree(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for side, root in enumerate((before, after)):
        root.mkdir()
        _put(root, side)
    (after / "one").chmod(0o755)
    patch = _changes(before, after).encode()
    assert _tree(before) != _tree(after)
    for more in (["--check"], []):
        made = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *more], cwd=before, input=patch, capture_output=True, check=False
        )
        assert made.returncode == 0, (made.stderr, patch)
    assert _tree(before) == _tree(after)

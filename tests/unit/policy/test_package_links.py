"""Links of a package: those that stay in it are signed with it, and every other one is refused with its fix."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from policy import errors, package, symlinks
from policy.signing import statement as statements
from policy.symlinks import MOST_LINKS
from sandbox.kernel import libc
from sandbox.storage import package_reader
from tests import signing_kit

FILES = {
    "agent.toml": b"manifest",
    "main.js": b"main",
    "lib/tool/bin.js": b"tool",
    "lib/tool/a b": b"",
    ".bin/own": b"",
}
NPM = {".bin/tool": "../lib/tool/bin.js"}

KEPT: dict[str, dict[str, str]] = {
    "of npm's .bin": NPM,
    "beside its file": {"lib/tool/short": "bin.js"},
    "to a directory": {"node_modules": "lib"},
    "through another link": {"node_modules": "lib", ".bin/tool": "../node_modules/tool/bin.js"},
    "to another link": {**NPM, ".bin/alias": "tool"},
    "to a hidden file": {"own": ".bin/own"},
    "with dots in a name": {"lib/..x": "tool/bin.js", "a": "lib/..x"},
    "with a space": {"lib/x": "tool/a b"},
    "between packages that need each other": {"lib/a/b": "../b", "lib/b/a": "../a", "lib/a/x": "../tool/bin.js"},
    "of as many steps as a kernel takes": {f"l{n}": f"l{n + 1}" if n < MOST_LINKS else "main.js" for n in range(1, 41)},
}

# name: links, the part of the message, and whether `cp -rL` is the fix (else the link is taken out).
REFUSED: dict[str, tuple[dict[str, str], str, bool]] = {
    "absolute": ({"x": "/etc/passwd"}, "absolute path", True),
    "absolute, of the sandbox": ({"x": "/workspace/main.js"}, "absolute path", True),
    "absolute, two slashes": ({"x": "//etc/passwd"}, "absolute path", True),
    "of the process": ({"x": "/proc/self/root/etc"}, "absolute path", True),
    "above the package": ({"x": "../x"}, "leaves the package", True),
    "far above": ({".bin/x": "../../../../../../etc/passwd"}, "leaves the package", True),
    "to the directory above": ({"x": ".."}, "leaves the package", True),
    "out and in again": ({"x": "../pkg/main.js"}, "leaves the package", True),
    "out through a link": ({"d": "lib/e", "lib/e": "../../.."}, "leaves the package", True),
    "through a link, then up": ({"d": "lib/tool", "x": "d/../../main.js"}, "plain spelling", True),
    "up in the middle": ({"x": "lib/../main.js"}, "plain spelling", True),
    "with a dot": ({"x": "./main.js"}, "plain spelling", True),
    "to its own directory": ({"x": "."}, "plain spelling", True),
    "with a slash behind": ({"x": "lib/"}, "plain spelling", True),
    "with two slashes": ({"x": "lib//tool"}, "plain spelling", True),
    "empty": ({"x": ""}, "plain spelling", True),
    "to itself": ({"x": "x"}, "loop", False),
    "two in a circle": ({"x": "y", "y": "x"}, "loop", False),
    "three in a circle": ({"x": "lib/y", "lib/y": "z", "lib/z": "../x"}, "loop", False),
    "through itself": ({"x": "x/main.js"}, "loop", False),
    "to the package": ({"lib/x": ".."}, "is a loop", False),
    "to a directory around it": ({"lib/tool/x": "../../lib"}, "is a loop", False),
    "to an ancestor by a link": ({"lib/tool/x": "../../y", "y": "lib"}, "is a loop", False),
    "to nothing": ({"x": "nothing"}, "does not have", False),
    "to nothing, by a link": ({"x": "y/nothing", "y": "lib"}, "does not have", False),
    "to an empty directory": ({"x": "empty"}, "does not have", False),
    "through a file": ({"x": "main.js/y"}, "is no directory", False),
    "to the envelope": ({"x": "agent.dsse.json"}, "does not have", False),
    "more steps than a kernel takes": (
        {f"l{n}": f"l{n + 1}" if n <= MOST_LINKS else "main.js" for n in range(1, MOST_LINKS + 2)},
        "more than 40",
        True,
    ),
    "a long text": ({"x": "/".join(["y"] * 600)}, "more than 1024 bytes", True),
    "the tools": ({"tools.json": "main.js"}, "has to be a file", True),
    "their pins": ({"tools.lock.json": "main.js"}, "has to be a file", True),
    "a text with a line break": ({"x": "a\nb"}, "U+000A", True),
    "a text that turns around": ({"x": "a\u202eb"}, "U+202E", True),
    "a text that is not UTF-8": ({"x": "a\udcff"}, "not UTF-8", True),
    "a name that meets another": ({"MAIN.js": "lib/tool/bin.js"}, "only in case", True),
    "in the place of a directory": ({"lib": "main.js"}, "both a file and a directory", True),
    "in the place of a file": ({"main.js": "lib/tool/bin.js"}, "both a file and a symlink", False),
    "with a file below it": ({"main.js/x": "../agent.toml"}, "both a file and a directory", True),
}


def laid(top: Path, links: Mapping[str, str]) -> Path:
    """Lay the package out, with an empty directory, below a directory that has more."""
    for name, data in FILES.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)
    (top / "empty").mkdir()
    for name, text in links.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(text, top / name)
    return top


def opened(top: Path, path: str) -> str | None:
    """Return where the kernel finds a path beneath a directory."""
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    try:
        fd = libc.openat2(path, os.O_PATH, dir_fd=root, resolve=libc.RESOLVE_BENEATH)
    except OSError:
        return None
    finally:
        os.close(root)
    try:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), top)
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", KEPT)
def test_link_within_package_is_kept_and_read(name: str, tmp_path: Path) -> None:
    links = KEPT[name]
    top = laid(tmp_path / "pkg", links)
    read = package_reader.read(top)
    assert dict(read.links) == links
    assert dict(read.files) == FILES
    for path in links:
        assert symlinks.follow_in_package(path, links) == opened(top, path)


def test_table_has_at_least_20_shapes() -> None:
    assert len(REFUSED) >= 20


@pytest.mark.parametrize("name", REFUSED)
def test_other_link_is_refused_with_place_and_cause(name: str) -> None:
    links, says, _ = REFUSED[name]
    with pytest.raises(errors.PackageError) as caught:
        package.Package(FILES, None, links)
    assert says in caught.value.message
    assert caught.value.where in ("", None, *links)


# A link without a text, or in the place of a file, cannot be laid.
LAID = [
    name
    for name, (links, says, _) in REFUSED.items()
    if all(links.values()) and not says.startswith(("both a", "only in"))
]


@pytest.mark.parametrize("name", LAID)
def test_fix_of_refused_link_holds(name: str, tmp_path: Path) -> None:
    links, says, copied = REFUSED[name]
    top = laid(tmp_path / "pkg", links)
    with pytest.raises(errors.PackageError) as caught:
        package_reader.read(top)
    assert says in caught.value.message
    (tmp_path / "x").write_bytes(b"beside the package")
    if caught.value.hint and "take it" not in caught.value.hint:
        assert ("cp -rL" if copied else "take the link out") in caught.value.hint
    if copied and all((top / path).is_file() and not says.startswith("U+") for path in links):
        subprocess.run(["cp", "-rL", top, tmp_path / "copy"], check=True)
        assert not package_reader.read(tmp_path / "copy").links
    for path in links:
        (top / path).unlink()
    assert package_reader.read(top).links == {}


def test_link_is_part_of_digest_and_is_no_file() -> None:
    made = package.Package(FILES, None, NPM)
    others = [
        package.Package(FILES),
        package.Package(FILES, None, {".bin/tool": "../lib/tool/a b"}),
        package.Package(FILES, None, {".bin/tools": "../lib/tool/bin.js"}),
        package.Package({**FILES, ".bin/tool": NPM[".bin/tool"].encode()}),
        package.Package({**FILES, ".bin/tool": FILES["lib/tool/bin.js"]}),
    ]
    assert made.digest not in {one.digest for one in others}
    assert made.with_envelope(b"{}").digest == made.digest
    assert made.with_manifest(b"another").links == made.links


def test_statement_lists_link_by_digest_of_its_text() -> None:
    made = package.Package(signing_kit.FILES, None, {"l": "main.py"})
    said = signing_kit.statement(made)
    assert statements.parse(said.encode()) == said
    assert b'"symlinkSha256"' in said.encode()
    raw = said.encode().replace(b"symlinkSha256", b"sha256")
    assert statements.parse(raw).subjects["l"] != said.subjects["l"], "the digest of a file is another"
    signed = made.with_envelope(signing_kit.envelope(said.encode()))
    assert signing_kit.verify(signed).package.links == {"l": "main.py"}
    moved = [
        package.Package(signing_kit.FILES, signed.envelope, {"l": "agent.toml"}),
        package.Package(signing_kit.FILES, signed.envelope),
        package.Package({**signing_kit.FILES, "l": b"main.py"}, signed.envelope),
        package.Package(signing_kit.FILES, signed.envelope, {"l": "main.py", "m": "main.py"}),
    ]
    for one in moved:
        with pytest.raises(errors.DigestMismatchError):
            signing_kit.verify(one)


def test_file_is_found_through_links_and_dots_are_not_followed() -> None:
    made = package.Package(FILES, None, {**NPM, "d": "lib"})
    assert made.file_at(".bin/tool") == "lib/tool/bin.js"
    assert made.file_at("d/tool/bin.js") == "lib/tool/bin.js"
    assert made.file_at("main.js") == "main.js"
    assert [made.file_at(path) for path in ("d", "lib", "d/../main.js", "./d/tool/bin.js", "../x", "no")] == [None] * 6


def test_many_links_are_walked_once() -> None:
    """As long a chain of links as a package may have, each a step further: no walk for each from its start."""
    text = "/".join([".."] * 30)
    deep = "/".join(["d"] * 30)
    links = {f"{deep}/l{n}": f"{text}/{deep}/f" for n in range(9_000)}
    made = package.Package({"agent.toml": b"", f"{deep}/f": b""}, None, links)
    assert len(made.links) == 9_000
    with pytest.raises(errors.PackageError, match="more than 10000 files"):
        package.Package({"agent.toml": b""}, None, {f"l{n}": "agent.toml" for n in range(10_000)})


def test_reader_never_follows(tmp_path: Path) -> None:
    """A tree that changes while it is read: the text that was read is checked, and not what is there later."""
    top = laid(tmp_path / "pkg", NPM)
    real = package_reader.open_entry

    def swapped(name: str, path: str, directory: int, flags: int) -> int:
        if path == ".bin/tool":
            (top / path).unlink()
            (top / path).symlink_to("/etc/passwd")
        return real(name, path, directory, flags)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(package_reader, "open_entry", swapped)
        with pytest.raises(errors.PackageError, match="changed while it was read"):
            package_reader.read(top)
    shutil.rmtree(top)

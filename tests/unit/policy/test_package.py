"""Names, counts and sizes of a package; each refusal beside a package that is accepted."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from policy import errors, package

BASE = {"agent.toml": b"x"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "not a plain relative path"),
        ("/etc/passwd", "is absolute"),
        ("../x", "not a plain relative path"),
        ("a/../b", "not a plain relative path"),
        ("a/./b", "not a plain relative path"),
        ("a//b", "not a plain relative path"),
        ("a/", "not a plain relative path"),
        ("a\0b", "U+0000"),
        ("a\nb", "U+000A"),
        ("a\x1b[31m", "U+001B"),
        ("a\x7f", "U+007F"),
        ("a\u202etxt.exe", "U+202E"),
        ("a\u200b", "U+200B"),
        ("main\ufe0f.py", "U+FE0F"),
        ("main\u3164.py", "U+3164"),
        ("main\u034f.py", "U+034F"),
        ("main\U000e0100.py", "U+E0100"),
        ("main\u00a0.py", "U+00A0"),
        ("a\ue000", "U+E000"),
        ("a\u0378", "U+0378"),
        ("a\u2028b", "U+2028"),
        ("bad\udcff", "is not UTF-8"),
        ("/".join("d" * 33), "deeper than 32"),
        ("n" * 256, "too long"),
        ("/".join(["n" * 250] * 5), "too long"),
        ("agent.dsse.json", "is the envelope"),
    ],
)
def test_bad_name_is_refused(name: str, says: str) -> None:
    with pytest.raises(errors.PackageError) as caught:
        package.Package({**BASE, name: b""})
    assert says in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "a/b/c",
        ".hidden",
        "name with spaces",
        "...",
        "ünïcödé/日本",
        "n" * 255,
        "/".join("d" * 32),
        "sub/agent.dsse.json",
    ],
)
def test_plain_name_is_accepted(name: str) -> None:
    assert name in package.Package({**BASE, name: b""}).files


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Main.py", "main.py"),
        ("caf\u00e9", "cafe\u0301"),
        ("stra\u00dfe", "STRASSE"),
        ("\u212b", "\u00e5"),
        ("\ufb01le", "file"),
        ("Lib/a", "lib/b"),
        ("x/Y/1", "x/y/2"),
        ("\u0130", "i\u0307"),
        ("\u1d2e", "b"),
    ],
)
def test_names_that_some_file_system_takes_for_one_are_refused(one: str, other: str) -> None:
    for names in ((one, other), (other, one)):
        with pytest.raises(errors.PackageError, match="differ only in case or Unicode form"):
            package.check_paths(names)
    package.check_paths([one])
    package.check_paths([other])


def test_look_alike_of_envelope_is_refused() -> None:
    with pytest.raises(errors.PackageError, match="differ only in case"):
        package.Package({**BASE, "Agent.DSSE.json": b""})


def test_file_cannot_be_directory_too() -> None:
    for names in (("a", "a/b"), ("a/b", "a")):
        with pytest.raises(errors.PackageError, match="both a file and a directory"):
            package.check_paths(names)


def test_limits_of_count_and_size_hold_at_their_edge() -> None:
    package.check_size(files=10_000, total_bytes=256 * 2**20)
    with pytest.raises(errors.PackageError, match="more than 10000 files"):
        package.check_size(files=10_001, total_bytes=0)
    with pytest.raises(errors.PackageError, match="larger than 256 MiB"):
        package.check_size(files=1, total_bytes=256 * 2**20 + 1)
    with pytest.raises(errors.PackageError, match="more than 10000 files"):
        package.Package({**BASE, **{f"f{n}": b"" for n in range(10_000)}})
    with pytest.raises(errors.PackageError, match="larger than 8 MiB"):
        package.Package(BASE, b" " * (8 * 2**20 + 1))


def test_package_without_manifest_is_refused() -> None:
    with pytest.raises(errors.PackageError, match=r"has no `agent\.toml`"):
        package.Package({"main.py": b""})


def test_digests_are_of_bytes_and_cannot_be_given() -> None:
    made = package.Package({"b": b"2", "agent.toml": b"1"})
    assert made.digests == {"agent.toml": hashlib.sha256(b"1").hexdigest(), "b": hashlib.sha256(b"2").hexdigest()}
    assert made.manifest == b"1"
    with pytest.raises(TypeError):
        package.Package(BASE, digest="0" * 64)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        made.files["b"] = b"3"  # type: ignore[index]


def test_digest_does_not_depend_on_order_or_envelope_and_depends_on_all_else() -> None:
    base = package.Package({"agent.toml": b"1", "b": b"2"})
    assert package.Package({"b": b"2", "agent.toml": b"1"}, b"{}").digest == base.digest
    others = [{"agent.toml": b"1", "b": b"3"}, {"agent.toml": b"1", "c": b"2"}, {"agent.toml": b"1"}]
    assert base.digest not in {package.Package(files).digest for files in others}


def test_digest_is_what_sha256sum_prints(tmp_path: Path) -> None:
    files = {"agent.toml": b"1", "b/c": b"2", "B2": b"3", "é": b"4"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    command = "find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == package.Package(files).digest


def test_droppings_are_named() -> None:
    names = ["main.py", "__pycache__/main.pyc", "a/.git/HEAD", "x~", ".main.py.swp", ".DS_Store", "git", "tmp"]
    assert package.droppings(names) == ("__pycache__/main.pyc", "a/.git/HEAD", "x~", ".main.py.swp", ".DS_Store")

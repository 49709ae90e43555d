"""The librarian answers from what is there, quotes it truly, and is led nowhere else."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit import agent_modules

MAIN = Path(__file__).resolve().parents[2] / "agents" / "librarian" / "main.py"


@pytest.fixture(scope="module")
def librarian() -> ModuleType:
    return agent_modules.load(MAIN)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A small /usr/share/doc."""
    root = tmp_path / "doc"
    texts = {
        "libseccomp2/copyright": "Upstream-Name: libseccomp\nSource: somewhere\n",
        "file/README.Debian": "intro\n\nseccomp support\nbuilt with seccomp\nthe end\n",
        "bash/changelog": "fixed a thing about seccomp\n",
        "cake/README": "flour, sugar and eggs\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    return root


def _answer(librarian: ModuleType, question: str, *roots: Path) -> tuple[str, list[str]]:
    answer = librarian.answer(question, [str(root) for root in roots])
    assert set(answer) == {"text", "sources"}
    json.dumps(answer).encode("utf-8")
    return answer["text"], answer["sources"]


def test_sources_are_real_files_with_best_first(librarian: ModuleType, shelf: Path) -> None:
    text, sources = _answer(librarian, "which package mentions seccomp", shelf)
    assert sources == [str(shelf / name) for name in ("libseccomp2/copyright", "file/README.Debian", "bash/changelog")]
    assert "  3: seccomp support\n  4: built with seccomp" in text
    assert text.startswith('"seccomp": 3 of 4 files of ')
    assert "packages: libseccomp2, file, bash." in text


def test_packed_files_are_read_and_cut_ones_too(librarian: ModuleType, shelf: Path) -> None:
    packed = gzip.compress(b"all about seccomp\n" + os.urandom(200_000))
    (shelf / "cake/NEWS.gz").write_bytes(packed[:100_000])
    assert str(shelf / "cake/NEWS.gz") in _answer(librarian, "seccomp", shelf)[1]


def test_small_file_that_unpacks_to_large_one_is_cut(librarian: ModuleType, shelf: Path) -> None:
    bomb = gzip.compress(b"\0" * (64 << 20) + b"seccomp")
    assert len(bomb) < librarian.FILE_BYTES
    assert len(librarian.unpack(bomb)) == librarian.UNPACKED_BYTES


def test_no_symlink_leads_out(librarian: ModuleType, shelf: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("seccomp seccomp seccomp\n")
    (shelf / "cake/link").symlink_to(outside / "secret")
    (shelf / "linked").symlink_to(outside)
    _, sources = _answer(librarian, "seccomp", shelf)
    assert sources == [str(shelf / name) for name in ("libseccomp2/copyright", "file/README.Debian", "bash/changelog")]
    # Nor by a path that was a file when it was listed.
    assert librarian.read(str(shelf / "cake/link")) == b""


def test_odd_entries_are_passed_over(librarian: ModuleType, shelf: Path) -> None:
    os.mkfifo(shelf / "cake/fifo")
    (shelf / "cake/broken.gz").write_bytes(b"\x1f\x8bseccomp is not in here")
    (shelf / "cake/latin").write_bytes(b"caf\xe9 and \x1b[31mseccomp\x07\xff\n")
    Path(os.fsdecode(os.fsencode(shelf) + b"/cake/\xff\xfe")).write_text("seccomp\n")
    (shelf / "cake/line\nbreak").write_text("seccomp\n")
    text, sources = _answer(librarian, "seccomp", shelf)
    assert [Path(source).name for source in sources] == ["copyright", "README.Debian", "latin", "changelog"]
    assert "\x1b" not in text
    assert "\x07" not in text
    assert librarian.read(str(shelf / "cake/fifo")) == b""


def test_same_text_is_quoted_once_and_package_has_one_place(librarian: ModuleType, shelf: Path) -> None:
    (shelf / "file-dev").mkdir()
    (shelf / "file-dev/README.Debian").write_text((shelf / "file/README.Debian").read_text())
    (shelf / "file/NEWS").write_text("seccomp\n")
    _, sources = _answer(librarian, "seccomp", shelf)
    assert sources.count(str(shelf / "file/README.Debian")) == 1
    assert str(shelf / "file-dev/README.Debian") not in sources
    assert str(shelf / "file/NEWS") not in sources


def test_time_up_gives_what_was_found_and_says_so(
    librarian: ModuleType, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(librarian.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(librarian, "SEARCH_SECONDS", 2.5)
    text, sources = _answer(librarian, "seccomp", shelf)
    assert sources == [str(shelf / "file/README.Debian")]
    assert "(the time was up before the rest)" in text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Which package mentions seccomp?", ["seccomp"]),
        ("licenses and FONTS of glass", ["license", "font", "glass"]),
        ("who is the", []),
        ("", []),
        ("g++ c11 x.y-z_1", ["c11", "x.y-z_1"]),
        (" ".join(f"word{n}" for n in range(100)), [f"word{n}" for n in range(8)]),
    ],
)
def test_words_of_question(librarian: ModuleType, question: str, words: list[str]) -> None:
    assert librarian.words_of(question) == words


def test_without_words_or_without_finds_it_says_so(librarian: ModuleType, shelf: Path) -> None:
    assert _answer(librarian, "which?", shelf) == (
        "Name what I should look for, for example: which package mentions seccomp",
        [],
    )
    assert _answer(librarian, "xyzzy", shelf) == (f'Nothing mentions "xyzzy" in 4 files of {shelf}.', [])


def test_root_missing_is_empty_one(librarian: ModuleType, shelf: Path, tmp_path: Path) -> None:
    assert len(_answer(librarian, "seccomp", tmp_path / "none", shelf)[1]) == 3


def test_long_lines_are_cut_around_word(librarian: ModuleType) -> None:
    shown = librarian.shown("x" * 500 + " seccomp " + "y" * 500, ["seccomp"])
    assert "seccomp" in shown
    assert shown.startswith("...")
    assert len(shown) <= librarian.LINE_CHARACTERS + 6


def test_it_searches_what_its_manifest_grants(librarian: ModuleType) -> None:
    assert librarian.granted_roots() == ["/usr/share/doc"]

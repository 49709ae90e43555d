"""The pages as a site: each is in the navigation, no link leads nowhere, and none loads anything from elsewhere.

Pictures of three pages are in build/pictures afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import browser_kit
from tests.browser_kit import ROOT, Page

PICTURES = ROOT / "build/pictures"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as the script makes it."""
    made = tmp_path_factory.mktemp("made") / "site"
    done = subprocess.run([ROOT / "scripts/site", made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return made


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser_kit.browser() as made:
        yield made


def named(part: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(part, str):
        yield part
    else:
        for one in part.values() if isinstance(part, dict) else part:
            yield from named(one)


def test_each_page_is_in_navigation_once() -> None:
    listed = list(named(tomllib.loads((ROOT / "docs/zensical.toml").read_text())["project"]["nav"]))
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/howto").glob("*.md")]
    expected = {"README.md", "SECURITY.md", "CHANGELOG.md", *(str(one.relative_to(ROOT)) for one in pages)}
    assert sorted(listed) == sorted(expected)


def test_link_that_leads_nowhere_fails(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "docs", clone / "docs")
    (clone / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/site", clone / "scripts/site")
    (clone / ".venv").symlink_to(ROOT / ".venv")
    with (clone / "docs/ci.md").open("a") as file:
        file.write("\nSee [that](nowhere.md).\n")
    done = subprocess.run([clone / "scripts/site", tmp_path / "site"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "site").exists()


def test_second_build_gives_same_bytes(site: Path, tmp_path: Path) -> None:
    """From files in another order, at another place and time, under a umask that hides files from a web server."""
    clone, made = tmp_path / "clone", tmp_path / "site"
    pages = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "scripts/site")]
    for path in reversed([*pages, *sorted(one for one in (ROOT / "docs").rglob("*") if one.is_file())]):
        (clone / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, clone / path.relative_to(ROOT))
    (clone / ".venv").symlink_to(ROOT / ".venv")
    more = {"SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    command = [str(clone / "scripts/site"), str(made)]
    subprocess.run(command, env={**os.environ, **more}, capture_output=True, check=True, umask=0o077)
    first, second = ({str(one.relative_to(top)): one for one in top.rglob("*")} for top in (site, made))
    assert set(first) == set(second)
    changed = [name for name, one in first.items() if one.is_file() and one.read_bytes() != second[name].read_bytes()]
    assert changed == []
    assert {one.stat().st_mode & 0o777 for one in made.rglob("*.html")} == {0o644}


@pytest.mark.parametrize("name", ["index", "docs/getting-started", "docs/architecture"])
def test_page_loads_nothing_from_elsewhere(site: Path, page: Page, name: str) -> None:
    page.urls.clear()
    for size in ("desk", "phone"):
        page.look(size, "dark" if size == "phone" else "light")
        page.go(f"file://{site}/{name}.html")
        page.picture(PICTURES / f"{Path(name).name}-{size}.png")
    assert [url for url in page.urls if not url.startswith(("file:///", "data:", "blob:"))] == []
    assert len(page.urls) >= 2
    assert page.evaluate("document.querySelector('h1') !== null") is True
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth") is True


def test_names_in_tables_are_not_cut(site: Path, page: Page) -> None:
    """A name has at most one line more than it has spaces and hyphens to break at, on each screen."""
    script = """[...document.querySelectorAll('td code')].filter((one) =>
        one.getClientRects().length > one.textContent.split(/[ -]+/).length).map((one) => one.textContent)"""
    for size in ("desk", "phone"):
        page.look(size, "light")
        for name in ("agents", "errors", "manifest-keys"):
            page.go(f"file://{site}/docs/{name}.html")
            assert page.evaluate("document.querySelectorAll('td code').length") > 20
            assert page.evaluate(script) == []


def test_search_finds_pages_and_no_decisions(site: Path) -> None:
    places = [one["location"] for one in json.loads((site / "search.json").read_text())["items"]]
    assert any(one.startswith("docs/workspaces.html") for one in places)
    assert [one for one in places if "adr/" in one] == []
    assert "<h1" in (site / "docs/adr/0001-the-house.html").read_text()


def test_no_page_names_a_resource_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//", re.IGNORECASE)
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    # The theme would fetch the program that draws these.
    assert [str(one) for one in pages if 'class="mermaid"' in one.read_text()] == []
    assert [str(one) for one in pages if loads.search(one.read_text())] == []

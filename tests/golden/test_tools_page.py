"""docs/tools.md is what the parser and the checks do.

Regenerate with: .venv/bin/python tests/golden/test_tools_page.py
"""

from __future__ import annotations

import pathlib
import re
import subprocess

from policy import package as packages
from policy.manifest.tools import advertised, checks, document, pins
from scripts import tools_page
from tests import tools_kit

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tools.md"


def test_page_is_what_models_say() -> None:
    assert PAGE.read_text() == tools_page.page(), "regenerate docs/tools.md (see above)"


def test_page_names_every_key_and_code() -> None:
    text = PAGE.read_text()
    for model in (document.ToolManifest, document.Server, document.Tool, document.NativeTool):
        assert [key for key in model.model_fields if f"| `{key}` |" not in text] == []
    assert [code for code in {**checks.CODES, **advertised.CODES} if f"| `{code}` |" not in text] == []


def test_digest_is_what_page_computes(tmp_path: pathlib.Path) -> None:
    """The command of the page, run as it is printed."""
    (line,) = re.findall(r"^cd mine/tools/fs && (\{.*)$", PAGE.read_text(), re.MULTILINE)
    files = {**tools_kit.SERVER_FILES, "tools/fs/a b/ü": b"x", "tools/fs/Z": b"", "tools/fs/a-c": b"y"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    links = {"tools/fs/.bin/fs": "../dist/index.js", "tools/fs/Y": "a b/ü", "tools/fs/a b.l": "Z"}
    for name, text in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(text)
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=tmp_path / "tools/fs", capture_output=True, text=True, check=True, timeout=60
    )
    read = packages.Package(tools_kit.package(tools_kit.FULL, pin=False, files=files).files, None, links)
    assert pins.package_digest(read, "fs") == f"sha256:{done.stdout.split()[0]}"


if __name__ == "__main__":
    PAGE.write_text(tools_page.page())

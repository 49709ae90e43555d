"""docs/manifest.md is what the parser does, key by key.

Regenerate with: .venv/bin/python tests/golden/test_manifest_page.py
"""

from __future__ import annotations

import pathlib
import tomllib

from scripts import manifest_page

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "manifest.md"


def test_page_is_what_models_say() -> None:
    assert PAGE.read_text() == manifest_page.page(), "regenerate docs/manifest.md (see above)"


def test_page_names_every_key_of_full_manifest() -> None:
    document = tomllib.loads((ROOT / "tests" / "golden" / "manifest" / "full.toml").read_text())
    for part in ("permissions", "services", "tools"):
        document |= {f"{part}.{name}": table for name, table in document.pop(part).items()}
    document["tools.command.rule"] = [
        {key: 0 for one in document["tools.command"] for rule in one.pop("rule", ()) for key in rule}
    ]
    document["permissions.skills.rule"] = [
        {key: 0 for one in document["permissions.skills"].pop("rule") for key in one}
    ]
    for name, table in document.items():
        section = PAGE.read_text().split(f"[{name}]", 1)[1].split("\n## ", 1)[0]
        for key in table[0] if isinstance(table, list) else table:
            assert f"| `{key}` |" in section, f"[{name}] {key}"


if __name__ == "__main__":
    PAGE.write_text(manifest_page.page())

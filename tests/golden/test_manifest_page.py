"""docs/manifest*.md are what the parser does, key by key.

Regenerate with: .venv/bin/python tests/golden/test_manifest_page.py
"""

from __future__ import annotations

import pathlib
import tomllib

from scripts import manifest_page

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_page_is_what_models_say() -> None:
    for name, text in manifest_page.pages().items():
        assert (DOCS / name).read_text() == text, f"regenerate docs/{name} (see above)"


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
    keys = "".join((DOCS / name).read_text() for name in ("manifest-keys.md", "manifest-grants.md"))
    for name, table in document.items():
        heading = f"[[{name}]]" if isinstance(table, list) else f"[{name}]"
        section = keys.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
        for key in table[0] if isinstance(table, list) else table:
            assert f"| `{key}` |" in section, f"[{name}] {key}"


def test_page_names_tables_as_tables() -> None:
    pages = manifest_page.pages()
    assert "| `env` | table of strings |" in pages["manifest-keys.md"]
    grants = pages["manifest-grants.md"]
    assert "| `may_grant` | array of tables |" in grants
    assert "| `allow` | array of tables |" in grants.split("\n## [services.models]\n", 1)[1].split("\n## ", 1)[0]
    assert (
        "| `allow` | array of strings |" in grants.split("\n## [permissions.executables]\n", 1)[1].split("\n## ", 1)[0]
    )


if __name__ == "__main__":
    for name, text in manifest_page.pages().items():
        (DOCS / name).write_text(text)

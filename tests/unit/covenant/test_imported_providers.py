"""Sections of version 1's secrets.toml as providers: in its order of fallback, and without their keys."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from covenant import imported_providers
from policy import errors
from policy.manifest.services import Models, Search, Services
from sandbox.network.service import providers

KEY = "sk-planted-0123456789"
FALLEN = ["llm", "llm-ollama", "llm-mock", "search-mock"]


def home(path: Path, text: str) -> Path:
    file = path / "secrets.toml"
    file.write_text(text)
    file.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("text", "order", "secrets"),
    [
        ("", ["llm", "llm-mock", "search-mock"], ()),
        ('[llm]\nprovider = "mock"\n', ["llm-mock", "search-mock"], ()),
        (
            f'[llm]\nprovider = "anthropic"\napi_key = "{KEY}"\n[search]\nprovider = "brave"\napi_key = "{KEY}"\n',
            ["llm", "llm-ollama", "llm-mock", "search", "search-mock"],
            ("llm", "search"),
        ),
        (
            f'[llm]\nprovider = "openai"\napi_key = "{KEY}"\n',
            ["llm", "llm-ollama", "llm-mock", "search-mock"],
            ("llm",),
        ),
        (
            f'[llm]\nprovider = "deepseek"\napi_key = "{KEY}"\n',
            ["llm", "llm-ollama", "llm-mock", "search-mock"],
            ("llm",),
        ),
        ('[search]\nprovider = "serpapi"\n[other]\nx = 1\n', ["llm", "llm-mock", "search", "search-mock"], ("search",)),
    ],
)
def test_sections_are_providers_in_order(tmp_path: Path, text: str, order: list[str], secrets: tuple[str, ...]) -> None:
    found = imported_providers.imported(home(tmp_path, text))
    known = providers.parse(found.text.encode(), file="providers.toml")
    assert (list(known), found.secrets) == (order, secrets)
    assert KEY not in found.text + found.manifest
    granted = tomllib.loads(found.manifest)["services"]
    services = Services(models=Models(**granted["models"]), search=Search(**granted["search"]))
    assert list(services.problems()) == []
    assert [one.provider for one in services.models.allow] == [name for name in order if name.startswith("llm")]
    assert [*services.search.allow] == [name for name in order if name.startswith("search")]


def test_endpoint_and_model_are_kept(tmp_path: Path) -> None:
    text = f'[llm]\nprovider = "openai"\napi_key = "{KEY}"\nmodel = "own-1"\nendpoint = "http://127.0.0.1:9"\n'
    found = imported_providers.imported(home(tmp_path, text))
    known = providers.parse(found.text.encode(), file="providers.toml")
    assert known["llm"].url == "http://127.0.0.1:9/v1"
    assert '"own-1"' in found.manifest
    assert imported_providers.imported(home(tmp_path, '[llm]\nprovider = "anthropic"\napi_key = "a"\n')).manifest.count(
        "claude-haiku-4-5"
    )


@pytest.mark.parametrize("text", ['[llm]\nprovider = "other"\n', f"[search]\napi_key = 3\n# {KEY}\n", f"[llm\n{KEY}"])
def test_file_that_cannot_be_used_is_told_without_its_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(errors.SettingError) as raised:
        imported_providers.imported(home(tmp_path, text))
    assert KEY not in str(raised.value) + raised.value.hint

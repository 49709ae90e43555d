"""The section [embed] of secrets.toml: who may read it, what may stand in it, and that nothing of it is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.providers.embed import pick
from covenant.providers.embed.hashed import HashEmbedder
from covenant.providers.embed.pick import EmbedSettings
from policy import errors


def write(home: Path, text: str, mode: int = 0o600) -> Path:
    path = home / "secrets.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_file_or_section_default_holds(home: Path) -> None:
    assert pick.read_settings(home) == EmbedSettings()
    write(home, '[llm]\napi_key = "k"\n')
    assert pick.read_settings(home) == EmbedSettings(provider="local")


def test_section_is_read_and_others_are_left_alone(home: Path) -> None:
    write(home, '[embed]\nprovider = "ollama"\nmodel = "m"\nendpoint = "http://h:1"\n[search]\nx = 1\n')
    assert pick.read_settings(home) == EmbedSettings(provider="ollama", model="m", endpoint="http://h:1")


def test_misspelt_key_is_refused_with_the_nearest(home: Path) -> None:
    misspelt = '[llm]\napi_key = "k"\n[embed]\nprovider = "ollama"\nmodle = "hunter2"\n'
    write(home, misspelt)
    with pytest.raises(errors.SettingError) as refused:
        pick.read_settings(home)
    assert refused.value.where == f"{home / 'secrets.toml'}:5"
    assert refused.value.message == "`[embed]` has a key that is none of its keys"
    assert refused.value.hint == "did you mean `model`? known here: provider, model, endpoint"
    write(home, misspelt.replace("modle", "model"))
    assert pick.read_settings(home) == EmbedSettings(provider="ollama", model="hunter2")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_file_that_others_can_read_is_refused(home: Path, mode: int) -> None:
    write(home, "[embed]\n", mode)
    with pytest.raises(errors.SettingError, match=f"mode 0{mode:o}"):
        pick.read_settings(home)


def test_symlink_is_refused(home: Path, tmp_path: Path) -> None:
    (home / "secrets.toml").symlink_to(write(tmp_path, "[embed]\n"))
    with pytest.raises(errors.SettingError, match="symlink"):
        pick.read_settings(home)
    (home / "secrets.toml").unlink()
    (home / "secrets.toml").symlink_to(tmp_path / "absent")
    with pytest.raises(errors.SettingError):
        pick.read_settings(home)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[embed", "no TOML"),
        ('[embed]\nprovider = "hunter2"', "embed.provider"),
        ('[embed]\nmodel = ["hunter2"]', "embed.model"),
        ('embed = "hunter2"', "embed"),
        ('[embed]\nhunter2 = "x"', "none of its keys"),
        ('embed = { hunter2 = "x" }', "none of its keys"),
        ("[embed]\nx = \udc80", "no TOML"),
    ],
)
def test_what_cannot_be_used_is_named_and_never_repeated(text: str, said: str) -> None:
    with pytest.raises(errors.SettingError, match=said) as refused:
        pick.parse_settings(text.encode("utf-8", "surrogateescape"), where="secrets.toml")
    assert "hunter2" not in str(refused.value) + refused.value.hint
    assert refused.value.__cause__ is None


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["local", "mock"])
async def test_default_and_version_1s_mock_are_local_one(provider: str) -> None:
    picked = await pick.pick(EmbedSettings.model_validate({"provider": provider}))
    assert isinstance(picked.embedder, HashEmbedder)
    assert picked.warning == ""

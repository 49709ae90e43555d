"""The sections [secrets] and [settlement] of secrets.toml, alone and through a whole daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.providers import secrets_file
from covenant.providers.chain import interface, pick
from covenant.providers.chain.local_vm import LocalVm
from policy import errors


def write(home: Path, text: str, mode: int = 0o600) -> None:
    path = home / "secrets.toml"
    path.touch(mode)
    path.chmod(mode)
    path.write_text(text)


def test_without_file_or_sections_there_is_nothing(home: Path) -> None:
    assert secrets_file.told(home) == secrets_file.SettlementSecrets({}, "off")
    write(home, '[embed]\nprovider = "local"\n[llm]\napi_key = "hunter2"\n')
    assert secrets_file.told(home) == secrets_file.SettlementSecrets({}, "off")


def test_secrets_and_chain_are_read_and_not_shown(home: Path) -> None:
    write(home, '[secrets]\nmail = "hunter2"\n"a/b:c" = "größe"\n[settlement]\nchain = "litesvm"\n')
    told = secrets_file.told(home)
    assert told.secrets == {"mail": b"hunter2", "a/b:c": "größe".encode()}
    assert told.chain == "litesvm"
    assert "hunter2" not in repr(told)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[secrets", "no TOML"),
        ("hunter2 = " + "9" * 5000, "no TOML"),
        ('secrets = "hunter2"', "no secret"),
        ("[secrets]\nmail = 5", "no secret"),
        ('[secrets]\nmail = { hunter2 = "x" }', "no secret"),
        ('[secrets]\n"hunter2 " = "x"', "none that can be asked for"),
        ('[secrets]\n"" = "x"', "none that can be asked for"),
        ('settlement = "hunter2"', "settlement.chain"),
        ('[settlement]\nchain = "hunter2"', "settlement.chain"),
        ("[settlement]\nchain = true", "settlement.chain"),
        ('[settlement]\nhunter2 = "litesvm"', "none of its keys"),
    ],
)
def test_what_cannot_be_used_is_refused_and_never_repeated(home: Path, text: str, said: str) -> None:
    write(home, text)
    with pytest.raises(errors.SettingError, match=said) as refused:
        secrets_file.told(home)
    assert "hunter2" not in str(refused.value) + refused.value.hint
    assert refused.value.__cause__ is None


def test_misspelt_key_of_settlement_is_refused(home: Path) -> None:
    write(home, '[settlement]\nchian = "litesvm"\n')
    with pytest.raises(errors.SettingError) as refused:
        secrets_file.told(home)
    assert refused.value.where == f"{home / 'secrets.toml'}:2"
    assert refused.value.hint.startswith("did you mean `chain`?")
    write(home, '[settlement]\nchain = "litesvm"\n')
    assert secrets_file.told(home).chain == "litesvm"


def test_file_that_others_can_read_is_refused(home: Path) -> None:
    write(home, "[secrets]\n", 0o640)
    with pytest.raises(errors.SettingError, match="mode 0640"):
        secrets_file.told(home)


def test_chain_is_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(pick.pick("off"), interface.OffChain)
    assert isinstance(pick.pick("litesvm"), LocalVm)
    monkeypatch.setattr(interface, "installed", lambda: False)
    assert isinstance(pick.pick("off"), interface.OffChain)
    with pytest.raises(errors.SettlementMissingError):
        pick.pick("litesvm")

"""Check that references are whole values, and that the refusal of a likely secret does not repeat it."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticCustomError

from policy.manifest import digests
from policy.manifest.tools import secret_scan

# In pieces, so that no secret scanner takes this file for a leak.
TOKENS = [
    "ghp" + "_16C7e42F292c6912E7710c838347Ae178B4a",
    "github" + "_pat_11ABCDEFG0abcdefghijkl",
    "glpat" + "-abcdefghij0123456789",
    "sk" + "-proj-abcdefghij0123456789",
    "sk" + "_live_abcdefghij0123",
    "xoxb" + "-123456789012-abcdefghijkl",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    "npm" + "_abcdefghij0123456789",
    "hf" + "_abcdefghij0123456789",
    "Bearer " + "abc123",
    "Basic " + "dXNlcjpwYXNz",
    "-----BEGIN RSA " + "PRIVATE KEY-----",
    "postgres://user:" + "pass@db.example.com/x",
    "prefix=ghp" + "_16C7e42F292c6912E7710c838347Ae178B4a",
    "9a4b8c0d1e2f3a4b5c6d7e8f90a1b2c3",
    "q8Zr3Lw9Xk2Vn7Tb5Hc1Jd6M",
]
HARMLESS = [
    "", "info", "/workspace", "/usr/share/doc/3rd", "application/json", "--port=8080", "2026.1.14", "en-US,en;q=0.9",
    "@modelcontextprotocol/server-filesystem", "https://example.com/mcp/v1", "server-filesystem-2026-edition-next",
    "a" * 40, "1" * 40, "0123456789", "node_modules/.bin/server", "dist/index.js", "sk-", "true",
]  # fmt: skip


@pytest.mark.parametrize("value", TOKENS)
def test_token_is_refused_and_not_repeated(value: str) -> None:
    assert secret_scan.looks_secret(value)
    with pytest.raises(PydanticCustomError) as caught:
        secret_scan.literal(value)
    context = caught.value.context or {}
    assert value not in str(context)
    assert "$env:NAME" in str(context["hint"])


@pytest.mark.parametrize("value", HARMLESS)
def test_harmless_literal(value: str) -> None:
    assert secret_scan.literal(value, name="LOG_LEVEL") == value
    assert secret_scan.referenced(value) is None


@pytest.mark.parametrize(
    "name", ["GITHUB_TOKEN", "api_key", "X-Api-Key", "Authorization", "DB_PASSWORD", "Cookie", "APIKEY"]
)
def test_under_telling_name_every_literal_is_refused(name: str) -> None:
    with pytest.raises(PydanticCustomError, match="written out"):
        secret_scan.literal("hunter2", name=name)
    assert secret_scan.literal("", name=name) == ""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("$env:GITHUB_TOKEN", "GITHUB_TOKEN"),
        ("$credential:github-token", "github-token"),
        ("$credential:a.b_c", "a.b_c"),
    ],
)
def test_whole_reference(value: str, name: str) -> None:
    assert secret_scan.referenced(value) == name


@pytest.mark.parametrize(
    "value",
    ["Bearer $env:TOKEN", "$env:TOKEN ", "$env:", "$env:1A", "x$credential:a", "$credential:", "$credential:-a",
     "${env:TOKEN}", "$ENV:TOKEN", "$env:A$env:B", "$env:TOKEN\n", "$Credential:x"],
)  # fmt: skip
def test_partial_reference_is_refused(value: str) -> None:
    with pytest.raises(PydanticCustomError, match="not the whole value"):
        secret_scan.referenced(value)


# --- digests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digits", "reason"),
    [
        ("0" * 64, "`0` throughout"),
        ("f" * 64, "`f` throughout"),
        ("ab" * 32, "repeats `ab`"),
        ("deadbeef" * 8, "repeats `deadbeef`"),
        ("0123456789abcdef" * 4, "repeats `0123456789abcdef`"),
        ("00112233445566778899aabbccddeeff" * 2, "repeats"),
        ("0" * 63 + "1", "no random number"),
        ("012" * 21 + "0", "no random number"),
        ("0123456789abcdef" + "0" * 16 + "fedcba9876543210" + "13579bdf02468ace", "no random number"),
        (digests.of(b"").removeprefix("sha256:"), "digest of nothing"),
    ],
)
def test_filler(digits: str, reason: str) -> None:
    assert reason in digests.filler(digests.well_formed(f"sha256:{digits}"))


@pytest.mark.parametrize("value", ["sha256:0000…", "sha256:…", "sha256:abc..."])
def test_abbreviation_is_filler(value: str) -> None:
    assert digests.filler(digests.well_formed(value)) == "it is abbreviated"


def test_digest_is_no_filler() -> None:
    for data in (b"a", b"b", b"c" * 1000):
        assert digests.filler(digests.of(data)) == ""


@pytest.mark.parametrize(
    "value", ["", "sha256:", "sha256:abc", f"sha256:{'A' * 64}", f"sha512:{'a' * 64}", "a" * 64, f"sha256:{'a' * 65}"]
)
def test_no_digest(value: str) -> None:
    with pytest.raises(PydanticCustomError, match="is not accepted"):
        digests.well_formed(value)


@pytest.mark.parametrize(
    "name", ["DB_PASS", "PGPASS", "DB_PWD", "OPENAI_KEY", "KEY", "X-Auth", "MNEMONIC", "SEED_PHRASE", "pass-phrase"]
)
def test_short_names_of_secrets(name: str) -> None:
    with pytest.raises(PydanticCustomError, match="written out"):
        secret_scan.literal("hunter2", name=name)


@pytest.mark.parametrize("name", ["PUBLIC_KEY", "KEYBOARD", "COMPASS", "PATH_LIST", "AUTHOR", "PWD", "PASSES"])
def test_names_that_only_look_like_those(name: str) -> None:
    assert secret_scan.literal("x", name=name) == "x"


@pytest.mark.parametrize(
    "line", ["--api-key=x", "API_KEY=x", "--token x", "-access_key x", "a --db-password=x", "--auth x", "token=x"]
)
def test_option_is_given_secret(line: str) -> None:
    with pytest.raises(PydanticCustomError, match="written out"):
        secret_scan.command_line(line.split())


@pytest.mark.parametrize(
    "line", ["--token", "--token --x", "--tokenizer=x", "token x", "--api-key=", "--max-tokens 5", "--author x", "x=y"]
)
def test_option_is_given_none(line: str) -> None:
    secret_scan.command_line(line.split())


@pytest.mark.parametrize("value", ["https://a.example/?token=x", "a?b=c&X-Amz-Signature=x", "?api_key=x", "h?sig=x"])
def test_query_that_carries_secret(value: str) -> None:
    assert secret_scan.looks_secret(value)


def test_prose_may_speak_of_secrets_and_holds_none() -> None:
    for said in ("sk-learn-compatible_models", "a bearer token", "postgres://user:password@host/db"):
        assert secret_scan.prose(said) == said
    with pytest.raises(PydanticCustomError, match="looks like a secret"):
        secret_scan.prose("use ghp" + "_abcdefghijklmnop1234 to log in")


@pytest.mark.parametrize(
    "value", ["wJalrXUtnFEMI/K7MDENG" + "/bPxRfiCYEXAMPLEKEY", "q8Zr3-Lw9Xk2_Vn7Tb5H" + "-c1Jd6M0_pAsYeFgU4"]
)
def test_random_run_with_signs_of_base64(value: str) -> None:
    assert secret_scan.looks_secret(value)
    assert secret_scan.looks_secret(f"--x={value}")


@pytest.mark.parametrize(
    "value",
    [
        "/workspace/Data/Reports/Quarterly/2026/Summary",
        "Content-Security-Policy-Report-Only-Mode-2",
        "node_modules/@Scope/server-filesystem/dist/Index2",
        "Europe/Amsterdam-and-some-other-places-V2",
        "00000000-0000-4000-8000-000000000000",
    ],
)
def test_path_or_hyphenated_name_is_none(value: str) -> None:
    assert not secret_scan.looks_secret(value)


def test_run_with_plus_signs_is_one_run() -> None:
    assert secret_scan.looks_secret("ab1CD2ef+gh3IJ4kl+mn5OP6qr")
    assert not secret_scan.looks_secret("ab1CD2ef gh3IJ4kl mn5OP6qr")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--token", "x"], True),
        (["a", "--token", "x"], True),
        (["--token=x"], True),
        (["abc", "--token", "-v"], False),
        (["abc", "--token"], False),
        (["x", "--tokens-file"], False),
        (["token", "x"], False),
    ],
)
def test_option_takes_the_next_word(words: list[str], refused: bool) -> None:
    if not refused:
        secret_scan.command_line(words)
        return
    with pytest.raises(PydanticCustomError):
        secret_scan.command_line(words)

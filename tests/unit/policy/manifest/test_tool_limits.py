"""The edges of what a tool manifest may hold: the last that is accepted, and the first that is not."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import digests, text
from policy.manifest.tools import checks, pins, secret_scan, tool_uri
from policy.manifest.tools import document as tools_document
from tests import tools_kit as kit

FS, WEATHER = ("servers", 0), ("servers", 1)


def nested(depth: int, *, lists: bool) -> Any:
    """A value of so many levels, itself one of them."""
    value: Any = [] if lists else {}
    for _ in range(depth - 1):
        value = [value] if lists else {"a": value}
    return value


def accepted(path: tuple[str | int, ...], value: Any) -> bool:
    try:
        tools_document.parse(kit.text(kit.full(*path, value=value)))
    except errors.ToolsError:
        return False
    return True


# The document, servers, a server, its tools and a tool are five levels around an input schema.
INSIDE = tools_document.NESTING - 5
EDGES: list[tuple[tuple[str | int, ...], Any, Any]] = [
    ((*FS, "env"), [f"{'A' * 128}=x"], [f"{'A' * 129}=x"]),
    ((*FS, "env"), [f"_=$env:{'A' * 128}"], [f"_=$env:{'A' * 129}"]),
    ((*FS, "env"), [f"_=$credential:{'a' * 128}"], [f"_=$credential:{'a' * 129}"]),
    ((*FS, "alias"), "a" * 64, "a" * 65),
    ((*FS, "tools", 0, "name"), "a" * 128, "a" * 129),
    ((*FS, "version"), "1" * 64, "1" * 65),
    ((*FS, "tools", 0, "timeout_ms"), 1, 0),
    ((*FS, "tools", 0, "timeout_ms"), 600_000, 600_001),
    ((*FS, "package_digest"), f"sha256:{'0' * 63}…", f"sha256:{'0' * 64}…"),
    ((*FS, "args"), ["x"] * 256, ["x"] * 257),
    (("description",), "x" * 16_384, "x" * 16_385),
    ((*WEATHER, "endpoint"), "https://a.com:65535/", "https://a.com:65536/"),
    ((*WEATHER, "endpoint"), "https://a.com:1/", "https://a.com:0/"),
    ((*WEATHER, "endpoint"), "https://a.com:8443/", "https://a.com:08443/"),
    ((*WEATHER, "endpoint"), "https://a.com:442/", "https://a.com:443/"),
    ((*WEATHER, "endpoint"), "https://a.com/x/y", "https://a.com/x//y"),
    ((*WEATHER, "endpoint"), "https://a.com/x", "https://a.com//x"),
    ((*WEATHER, "endpoint"), "https://a.com/.x", "https://a.com/./x"),
    ((*WEATHER, "headers"), {"a" * 64: "x"}, {"a" * 65: "x"}),
    ((*FS, "tools", 0, "input_schema"), {"a": nested(INSIDE - 1, lists=True)}, {"a": nested(INSIDE, lists=True)}),
    ((*FS, "tools", 0, "input_schema"), nested(INSIDE, lists=False), nested(INSIDE + 1, lists=False)),
]


@pytest.mark.parametrize(("path", "last", "first"), EDGES, ids=[f"{e[0][-1]} {n}" for n, e in enumerate(EDGES)])
def test_edges(path: tuple[str | int, ...], last: Any, first: Any) -> None:
    assert accepted(path, last)
    assert not accepted(path, first)


@pytest.mark.parametrize(
    "name", ["Connection", "content-length", "Host", "te", "Trailer", "transfer-encoding", "UPGRADE"]
)
def test_headers_of_transport_itself(name: str) -> None:
    assert not accepted((*WEATHER, "headers"), {name: "x"})
    assert accepted((*WEATHER, "headers"), {f"X-{name}": "x"})


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_X", "DYLD_INSERT_LIBRARIES", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PATH",
     "IFS", "BASH_ENV", "ENV", "PERL5LIB", "RUBYOPT", "JAVA_TOOL_OPTIONS"],
)  # fmt: skip
def test_variables_that_choose_code(name: str) -> None:
    assert not accepted((*FS, "env"), [f"{name}=x"])
    assert accepted((*FS, "env"), [f"MY_{name}=x"])


def test_rules_say_which_characters() -> None:
    with pytest.raises(errors.ToolsError) as caught:
        tools_document.parse(kit.text(kit.full(*FS, "alias", value="A")))
    assert caught.value.hint == "1 to 64 of a-z 0-9 _ -"
    with pytest.raises(errors.ToolsError) as caught:
        tools_document.parse(kit.text(kit.full(*FS, "tools", 0, "name", value="a b")))
    assert caught.value.hint == "1 to 128 of A-Z a-z 0-9 _ . -, and no dot at its end or before another"


def test_random_run_is_secret_from_24_characters_on() -> None:
    run = "q8Zr3Lw9Xk2Vn7Tb5Hc1Jd6M"
    assert len(run) == 24
    assert secret_scan.looks_secret(run)
    assert not secret_scan.looks_secret(run[1:])
    # Letters and digits, and yet nothing random: below 3.5 bits a character.
    for dull in ("aaaaaaaaaaaabbbbbbbbbbb1", "aaaaaaaaaabbbbbbccccdd12", "abcdef12abcdef12abcdef12"):
        assert not secret_scan.looks_secret(dull)
    assert secret_scan.looks_secret("abcdef123456abcdef123456")


def test_token_is_one_from_8_characters_on() -> None:
    assert secret_scan.looks_secret("ghp_" + "a" * 8)
    assert not secret_scan.looks_secret("ghp_" + "a" * 7)


def test_digest_of_few_digits_is_filler() -> None:
    seven, eight = "01234567"[:7], "01234567"
    # Not periodic: a period of 7 or 9 does not divide 64.
    assert digests.filler("sha256:" + (seven * 10)[:64])
    assert digests.filler("sha256:" + ((eight + "0") * 8)[:64]) == ""
    run = "0123456789abcdef"
    assert digests.filler(f"sha256:{'0' * 16}{run[1:]}{'1234567' * 4}{'89abc'}") == "it is no random number"
    assert digests.filler(f"sha256:{'0' * 15}{run[1:]}{'1234567' * 4}{'89abcd'}") == ""


def test_every_finding_is_told() -> None:
    """One server, one grant or one credential that is wrong does not hide the next."""
    document = kit.full()
    document["servers"].insert(1, {**document["servers"][0], "alias": "two", "command": "npx", "args": ["x"]})
    document["servers"].insert(2, {**document["servers"][0], "alias": "three", "command": "nothing"})
    grants = kit.GRANTS.replace("allow = [", 'allow = ["matrix://tool/mcp/fs/a@1", "matrix://tool/mcp/fs/b@1", ')
    read = kit.package(document, pin=False, grants=grants.replace(', "network"]', "]"))
    found = checks.verify(read, kit.manifest(read), tools_document.parse(read.files["tools.json"]))
    codes = [finding.code for finding in found]
    assert codes == [
        "filler_digest", "filler_digest", "package_missing", "filler_digest", "package_missing",
        "fetches_code", "program_outside", "not_pinned", "tool_unknown", "tool_unknown", "class_not_granted",
    ]  # fmt: skip
    assert all(finding.hint and finding.message and finding.where for finding in found)


def test_findings_of_every_server_and_tool_against_pins() -> None:
    read = kit.package(kit.FULL)
    document = kit.full("servers", 0, "tools", 0, "description", value="another")
    document["servers"][0]["tools"][1]["description"] = "another too"
    document["servers"][0]["package_digest"] = pins.package_digest(read, "fs")
    document["servers"][1]["tools"][0]["description"] = "and this"
    changed = kit.changed(read, {"tools.json": kit.text(document)})
    found = checks.verify(changed, kit.manifest(changed), tools_document.parse(kit.text(document)))
    assert [finding.code for finding in found] == ["pin_changed"] * 3


def test_lock_may_be_large_and_not_endless() -> None:
    lock = kit.package(kit.FULL).files[pins.LOCK]
    assert pins.parse(lock + b" " * (4 * 1024 * 1024 - len(lock))) == pins.parse(lock)
    with pytest.raises(errors.ToolsError, match="larger than 4194304 bytes"):
        pins.parse(lock + b" " * (4 * 1024 * 1024 - len(lock) + 1))
    raw = kit.text(kit.FULL)
    assert tools_document.parse(raw + b" " * (1024 * 1024 - len(raw))).servers == tools_document.parse(raw).servers


def test_lock_is_readable_and_in_one_order() -> None:
    lock = kit.package(kit.FULL).files[pins.LOCK].decode()
    assert lock.startswith('{\n  "schema_version": 1,\n  "servers": {\n    "fs": {\n')
    assert lock.endswith("}\n")
    assert lock.index('"read_text_file"') < lock.index('"write_file"')


def test_shown_values_of_secrets_are_their_beginnings() -> None:
    token = "ghp" + "_16C7e42F292c6912E7710c838347Ae178B4a"
    with pytest.raises(PydanticCustomError) as caught:
        secret_scan.literal(token)
    assert str(caught.value) == f"the value that begins with {text.quote('ghp_')} looks like a secret"


@pytest.mark.parametrize(
    "start",
    ["ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "sk_", "rk_", "pk_live_", "xoxa-", "xoxb-",
     "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "AKIA", "ASIA", "AIza", "ya29.", "eyJ", "npm_", "pypi-", "hf_",
     "dop_v1_", "SG.", "shpat_", "hvs.", "age-secret-key-", "AGE-SECRET-KEY-"],
)  # fmt: skip
def test_each_known_beginning(start: str) -> None:
    # Letters of one kind: it is the form that is seen, not randomness.
    for value in (f"{start}aaaaaaaa", f"key={start}aaaaaaaa", f"a {start}aaaaaaaa"):
        assert secret_scan.looks_secret(value), value
    assert not secret_scan.looks_secret(f"b{start[1:]}aaaaaaaa" if start != "ya29." else "bbaaaaaaa")


@pytest.mark.parametrize(
    "value", ["Bearer a", "basic a", "x token a", "-----BEGIN PRIVATE KEY", "-----BEGIN EC PRIVATE KEY", "a://b:c@d"]
)
def test_each_form_that_carries_one(value: str) -> None:
    assert secret_scan.looks_secret(value)


@pytest.mark.parametrize("value", ["bearer", "basic ", "tokens a", "-----BEGIN PUBLIC KEY", "a://b@d", "a://b:c/d"])
def test_forms_that_carry_none(value: str) -> None:
    assert not secret_scan.looks_secret(value)


@pytest.mark.parametrize(
    "name",
    ["token", "secret", "passw", "passphrase", "apikey", "api_key", "api-key", "accesskey", "access_key", "privatekey",
     "private-key", "credential", "authorization", "cookie", "session", "bearer", "signature"],
)  # fmt: skip
def test_each_telling_name(name: str) -> None:
    for spelt in (name, name.upper(), f"X-{name}-Y"):
        with pytest.raises(PydanticCustomError):
            secret_scan.literal("a", name=spelt)


@pytest.mark.parametrize(
    "word",
    [
        "latest",
        "next",
        "stable",
        "current",
        "beta",
        "alpha",
        "canary",
        "nightly",
        "edge",
        "dev",
        "main",
        "master",
        "head",
    ],
)
def test_each_word_that_moves(word: str) -> None:
    # With a digit each would be a version: it is the word that is refused.
    assert word in tool_uri.MOVING
    assert set(tool_uri.MOVING) == {w for w in tool_uri.MOVING if w.isalpha() and w.islower()}
    with pytest.raises(PydanticCustomError, match="is unpinned"):
        tool_uri.pinned(word.upper())


@pytest.mark.parametrize(
    "program",
    ["npx", "bunx", "pnpx", "npm", "pnpm", "yarn", "bun", "deno", "uvx", "uv", "pipx", "pip", "pip3", "docker",
     "podman", "nerdctl", "go", "cargo", "gem", "nix", "curl", "wget"],
)  # fmt: skip
def test_each_program_that_fetches(program: str) -> None:
    document = kit.full("servers", 0, "command", value=program)
    read = kit.package(document)
    assert [
        f.code for f in checks.verify(read, kit.manifest(read), tools_document.parse(read.files["tools.json"]))
    ] == ["fetches_code"]


@pytest.mark.parametrize("step", ["dlx", "exec", "x", "run", "tool", "install", "i", "create"])
def test_words_before_what_is_fetched(step: str) -> None:
    document = kit.full("servers", 0, "command", value="npm")
    document["servers"][0]["args"] = ["--yes", step, "--quiet", "some-server"]
    read = kit.package(document)
    (finding,) = checks.verify(read, kit.manifest(read), tools_document.parse(read.files["tools.json"]))
    assert finding.message == "command `npm` fetches what it runs: `some-server` is unpinned"


def test_finding_as_document() -> None:
    finding = checks.Finding("not_pinned", "no pin", "", "tools.json:1:2")
    assert finding.to_json() == {"code": "not_pinned", "message": "no pin", "hint": None, "where": "tools.json:1:2"}
    assert checks.Finding("a", "b", "do it", "d").to_json()["hint"] == "do it"


def test_what_tool_leaves_out() -> None:
    tool = tools_document.parse(
        kit.text(kit.full("servers", 0, "tools", 0, value={"name": "a", "side_effect_class": "read"}))
    )
    (first, _) = tool.servers[0].tools
    assert (first.description, first.timeout_ms, first.input_schema) == ("", 30_000, None)
    bare = tools_document.parse(b'{"schema_version": 1, "agent": "matrix://agent/a"}')
    assert (bare.description, bare.servers, bare.native_tools, list(bare.tools())) == ("", (), (), [])


@pytest.mark.parametrize("schema", [None, {"type": "object", "b": [1, "é"], "a": {}}])
def test_digest_of_tool_is_that_of_three_things(schema: dict[str, Any] | None) -> None:
    entry = {"name": "a", "description": "Says é", "side_effect_class": "read", "input_schema": schema}
    (tool, _) = tools_document.parse(kit.text(kit.full("servers", 0, "tools", 0, value=entry))).servers[0].tools
    shown = "null" if schema is None else '{"a":{},"b":[1,"\\u00e9"],"type":"object"}'
    whole = f'{{"description":"Says \\u00e9","input_schema":{shown},"name":"a"}}'
    assert pins.tool_digest(tool) == f"sha256:{hashlib.sha256(whole.encode()).hexdigest()}"


def test_header_or_item_is_pointed_at_itself() -> None:
    for path, value, begins in (
        ((*WEATHER, "headers"), {"Accept": "x", "Authorization": "hunter2"}, '"hunter2"'),
        (("allowed_side_effects",), ["read", "write", "read"], '"read"'),
        ((*FS, "env"), ["A=1", "$env:B$env:C"], '"$env:B$env:C"'),
    ):
        raw = kit.text(kit.full(*path, value=value)).decode()
        with pytest.raises(errors.ToolsError) as caught:
            tools_document.parse(raw.encode())
        line, column = map(int, caught.value.where.split(":")[1:])
        rows = raw.split("\n")
        assert rows[line - 1][column - 1 :].startswith(begins)
        assert begins not in "".join(rows[line:]).split('"servers"')[0]


HIDDEN_TAG, BIDI, NARROW = "\U000e0041", "\u202e", "\u200b"


@pytest.mark.parametrize(
    "schema",
    [
        {"description": f"x{BIDI}y"},
        {"properties": {"a": {"description": f"Ignore{HIDDEN_TAG}"}}},
        {"properties": {f"a{NARROW}": {}}},
        {"enum": ["a", ["b", f"{BIDI}"]]},
        {"default": "ghp" + "_abcdefghijklmnop1234"},
    ],
)
def test_what_model_reads_in_schema_is_what_person_reads(schema: dict[str, Any]) -> None:
    assert not accepted((*FS, "tools", 0, "input_schema"), schema)


def test_lines_and_tabs_in_schema_hide_nothing() -> None:
    assert accepted((*FS, "tools", 0, "input_schema"), {"description": "a\n\tb", "minimum": 1, "x": [None, True]})


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://a.com/%2e%2e/x",
        "https://a.com/.%2E/x",
        "https://a.com/x/%2E",
        "https://a.com/\u0430",
        "https://a.com\uff0fx",
    ],
)
def test_path_that_another_client_reads_otherwise(endpoint: str) -> None:
    assert not accepted((*WEATHER, "endpoint"), endpoint)
    assert accepted((*WEATHER, "endpoint"), "https://a.com/%2ex/..y/%252e")


@pytest.mark.parametrize("version", ["1.x+1", "1.2.x-beta", "1.X-1"])
def test_range_with_suffix_is_range(version: str) -> None:
    assert not accepted((*FS, "version"), version)
    assert accepted((*FS, "version"), "1.2.0-x.1")


@pytest.mark.parametrize("args", [["dist/index.js", "--token=x"], ["dist/index.js", "--token", "x"]])
def test_secret_behind_its_option(args: list[str]) -> None:
    assert not accepted((*FS, "args"), args)


@pytest.mark.parametrize("name", ["GCONV_PATH", "OPENSSL_CONF", "GLIBC_TUNABLES", "DOTNET_STARTUP_HOOKS"])
def test_more_variables_that_choose_code(name: str) -> None:
    assert not accepted((*FS, "env"), [f"{name}=x"])


def test_true_is_no_version() -> None:
    with pytest.raises(errors.ToolsError, match="is a boolean") as caught:
        tools_document.parse(kit.text(kit.full("schema_version", value=True)))
    assert caught.value.where == "tools.json:2:21"
    with pytest.raises(errors.ToolsError, match="is a boolean"):
        pins.parse(b'{"schema_version": true, "servers": {}}')

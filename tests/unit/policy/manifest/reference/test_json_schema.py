"""The schema against the corpus of bad manifests: it refuses them, but for those that no JSON Schema can tell."""

from __future__ import annotations

import base64
import json
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from typing import Annotated, Any

import jsonschema
import pydantic
import pytest
from jsonschema import validators

from policy.manifest import agent, fields, hosts, paths, report, shapes, text
from policy.manifest.reference import json_schema
from policy.manifest.tools import document as tools_document
from policy.manifest.tools import shapes as tools_shapes
from tests import manifest_corpus, signing_kit, tools_corpus, tools_kit


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    # ECMA's `$` is the end of the text; Python's also stands before a last newline.
    if isinstance(instance, str) and not re.search(re.sub(r"\$(?=\)|$|\|)", r"\\Z", pattern), instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


Validator = validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})
AGENT = Validator(json_schema.for_agent())
TOOLS = Validator(json_schema.for_tools())
STATEMENT = Validator(json_schema.for_statement())


def valid(document: str) -> bool:
    return bool(AGENT.is_valid(tomllib.loads(document)))


# What the schema lets pass of the corpus; shapes.LEFT says each to the reader of the schema.
BEYOND = frozenset(
    {
        *(
            case.name
            for case in (*manifest_corpus.RESOURCES, *manifest_corpus.SERVICES)
            if case.name.endswith(" a float")
        ),
        "provider twice",
        "placeholder taken",
        "published twice",
        "host port low",
        "host port of a gate",
        "host ports too many",
        "ssh host key spoiled",
        "ssh host twice",
        "place twice",
        "rule of no tool",
        "rule back reference",
        "rule look-ahead",
        "rule huge",
        "port a float",
        "path not NFC",
        "path of two alphabets",
        "path full-width letter",
        "path mathematical letter",
        "entry of two alphabets",
        "port range reversed",
        "port range of one",
        "ports overlap",
        "syscall both",
        "tree of no layer",
        "shm of all",
        "workspace of all",
        "executable twice",
        "section misspelt",
        "section two edits",
    }
)


@pytest.mark.parametrize("case", manifest_corpus.ALL, ids=lambda case: case.name)
def test_corpus(case: manifest_corpus.Refusal) -> None:
    assert valid(manifest_corpus.spoiled(case.old, case.new)) == (case.name in BEYOND)


def test_most_of_corpus_is_refused() -> None:
    assert len(BEYOND) < len(manifest_corpus.ALL) / 6
    assert valid(manifest_corpus.FULL)


LEAST = '[agent]\nid = "a"\nname = "A"\nversion = "1"\nruntime = "{}"\n'


@pytest.mark.parametrize(
    ("document", "accepted"),
    [
        (LEAST.format("hermes"), True),
        (LEAST.format("hermes") + 'entry = "/any/../thing"\n', True),
        (LEAST.format("node"), False),
        (LEAST.format("hermes") + "[permissions.filesystem]\n", False),
        (LEAST.format("hermes") + "[permissions]\n", True),
        (LEAST.format("hermes") + '[hermes]\napproval_policy = "auto-once"\n', True),
        (LEAST.format("hermes") + '[hermes]\napproval_policy = "whatever"\n', False),
        (LEAST.format("hermes") + '[hermes]\ntools_allowed = ["", "a"]\n', False),
        (LEAST.format("hermes") + '[sandbox]\nrequired = true\nbackend = "linux-gvisor"\n', False),
        (manifest_corpus.FULL + "[telemetry]\nat = 2026-01-31\n[[fauna]]\n", True),
        (manifest_corpus.FULL + "".join(f"[telemetry{n}]\n" for n in range(64)), True),
        (manifest_corpus.FULL + "".join(f"[telemetry{n}]\n" for n in range(65)), False),
        (manifest_corpus.FULL + "[syscalls]\n", False),
        ("telemetry = 1\n" + manifest_corpus.FULL, False),
        ("telemetry = []\n" + manifest_corpus.FULL, False),
    ],
)
def test_sections_and_rules(document: str, *, accepted: bool) -> None:
    assert valid(document) == accepted


# --- the generator -------------------------------------------------------------------------------


def test_every_rule_of_tools_says_what_it_can() -> None:
    assert set(tools_shapes.RULES) == set(tools_document.RULES)
    assert all(tools_shapes.RULES.values())


# The corpus of tools.json that the schema lets pass, by what is said of it; shapes.LEFT names each kind.
BEYOND_TOOLS = (
    "listed twice", "looks like a secret", "is written out", "chooses the code", "no single host", "usual spelling",
    ":443/", ":0/", "com:/", ":99999/", "has brackets", "header `Host`", "U+E0041", "weather.example.com/../x",
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"), tools_corpus.REFUSED, ids=[r[2][:60] for r in tools_corpus.REFUSED]
)
def test_corpus_of_tools(path: tuple[str | int, ...], value: Any, message: str) -> None:
    gone = value is tools_corpus.GONE
    document = tools_kit.full(*path, drop=True) if gone else tools_kit.full(*path, value=value)
    left = any(word in f"{message} {value}" for word in BEYOND_TOOLS)
    # A list that is a set is within its means.
    left = left and (path[-1], message) != ("allowed_side_effects", "listed twice")
    assert TOOLS.is_valid(document) == left


def test_tools_that_parse() -> None:
    assert list(TOOLS.iter_errors(tools_kit.FULL)) == []
    assert list(TOOLS.iter_errors(json.loads(tools_kit.SEED))) == []


def test_every_rule_says_what_it_can() -> None:
    assert set(shapes.RULES) == set(agent.RULES)
    assert [rule for rule, fragments in shapes.RULES.items() if not fragments] == [agent.syscalls]


def test_check_that_stands_in_no_table_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json_schema.for_agent()
    monkeypatch.delitem(shapes.VALIDATORS, paths.absolute)
    with pytest.raises(LookupError, match="absolute"):
        json_schema.for_agent()


def test_method_that_stands_in_no_table_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "DECORATED", {})
    with pytest.raises(LookupError, match="_inside_the_package"):
        json_schema.for_agent()


def test_type_without_shape_is_error() -> None:
    class Odd(fields.Section):
        value: Annotated[float, pydantic.Field(description="a number")]

    with pytest.raises(LookupError, match="float"):
        json_schema._object(Odd, style=json_schema.TOML)


def test_every_class_of_hidden_characters_is_hidden() -> None:
    hidden = re.compile(f"[{shapes.HIDDEN}]")
    wrong = [ch for ch in map(chr, range(0x10000)) if hidden.match(ch) and unicodedata.category(ch) not in text.HIDDEN]
    assert wrong == []


def test_keys_and_sections_are_those_of_models() -> None:
    properties = json_schema.for_agent()["properties"]
    assert set(properties) == set(agent.Manifest.model_fields)
    for name in ("resources", "sandbox", "spawn", "lifetime"):
        assert set(properties[name]["properties"]) == set(report.keys((name,)))
    network = properties["permissions"]["properties"]["network"]
    assert set(network["items"]["properties"]) == set(report.keys(("permissions", "network", 0)))


# --- the statement --------------------------------------------------------------------------------


def statement() -> dict[str, Any]:
    envelope = json.loads(signing_kit.signed().envelope or b"")
    value = json.loads(base64.b64decode(envelope["payload"]))
    assert isinstance(value, dict)
    return value


def test_statement_that_we_sign() -> None:
    assert list(STATEMENT.iter_errors(statement())) == []


@pytest.mark.parametrize(
    "change",
    [
        {"_type": "https://in-toto.io/Statement/v0.1"},
        {"predicateType": "https://example.com/other"},
        {"subject": []},
        {"more": 1},
        {"subject": [{"name": "agent.toml", "digest": {"sha256": "0" * 63}}]},
        {"subject": [{"name": "agent.toml", "digest": {"sha512": "0" * 64}}]},
    ],
    ids=str,
)
def test_statement_that_says_something_else(change: dict[str, Any]) -> None:
    assert not STATEMENT.is_valid({**statement(), **change})


@pytest.mark.parametrize(
    "change", [{"serial": -1}, {"serial": 2**53}, {"audience": ""}, {"parent_digest": "x"}, {"x": 1}]
)
def test_predicate_that_says_something_else(change: dict[str, Any]) -> None:
    document = statement()
    assert not STATEMENT.is_valid({**document, "predicate": {**document["predicate"], **change}})
    for key in document["predicate"]:
        left = {name: value for name, value in document["predicate"].items() if name != key}
        assert not STATEMENT.is_valid({**document, "predicate": left}), key


def test_hosts_of_every_kind() -> None:
    host = Validator(shapes.VALIDATORS[hosts.check])
    for good in (
        "a.com",
        "*.a.com",
        "10.0.0.1",
        "2001:db8::1",
        "::1",
        "10.0.0.0/8",
        "224.0.0.0/3",
        "::ffff:1",
        "fe80::/10",
    ):
        assert hosts.check(good) == good
        assert host.is_valid(good), good
    for bad in (
        "224.0.0.1",
        "0.0.0.0",
        "::",
        "ff02::1",
        "::ffff:0:1",
        "a",
        "a.1",
        "a.0x1",
        "a.localhost",
        "A.com",
        "a_b.com",
    ):
        assert not host.is_valid(bad), bad

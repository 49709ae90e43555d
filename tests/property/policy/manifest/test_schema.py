"""Check that the published schema accepts every manifest that the parser accepts; it may also accept more."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import hosts, parse, paths, permissions, shapes, text
from policy.manifest.reference import json_schema
from tests import manifest_corpus

# Python's patterns accept a little more than ECMA's: a final newline, which no value here contains.
AGENT = jsonschema.Draft202012Validator(json_schema.for_agent())
LINES = manifest_corpus.FULL.splitlines()
SECTIONS = [line for line in LINES if line.startswith("[")]
VALUES = (
    "0", "1", "443", "65535", "18446744073709551616", "true", "false", '"x"', '"off"', '"full"', '"host"', '"hermes"',
    '"outbound-https-only"', '"ephemeral"', '"node"', '"/a b/ü"', '"./-x"', '"./a:b"', '"*.example.com"', '"::1"',
    '"xn--bcher-kva.example"', "[]", "[443]", '["1-65535"]', '["/a"]', '["/a/@b/..c"]', '["a.b"]', '["read"]',
    '["tool.x"]', '["/x@sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"]',
)  # fmt: skip


def accepts(document: str) -> bool:
    """Whether the parser accepts the document; fail if it does and the schema refuses."""
    try:
        parse.parse(document.encode("utf-8", "surrogatepass"))
    except errors.ManifestError:
        return False
    assert [e.message for e in AGENT.iter_errors(tomllib.loads(document))] == []
    return True


def test_spoiled_manifests() -> None:
    accepted = []

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def see(data: st.DataObject) -> None:
        accepted.append(accepts(spoiled(data)))

    see()
    assert sum(accepted) > 20


def spoiled(data: st.DataObject) -> str:
    rows = list(LINES)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(rows) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                del rows[at]
            case 1:
                key = rows[at].split("=")[0]
                rows[at] = f"{key}= {data.draw(st.sampled_from(VALUES))}"
            case 2:
                column = data.draw(st.integers(0, len(rows[at])))
                rows[at] = rows[at][:column] + data.draw(st.text(max_size=2)) + rows[at][column:]
            case _:
                rows.insert(at, data.draw(st.sampled_from(SECTIONS)))
    return "\n".join(rows)


# Optional keys, each with values that fit some runtimes, modes and backends.
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "agent": {"runtime": ("python3", "hermes", "rust-bin"), "entry": ("a", "./-a", "./b:c", "/x/..")},
    "resources": {"network": ("off", "full", "outbound-https-only"), "disk_mb": (0, 1, 16777216)},
    "sandbox": {
        "required": (True, False),
        "backend": ("linux-gvisor", "trusted-local"),
        "filesystem": ("read-only-package", "ephemeral", "host"),
        "standby": (0, 64),
    },
    "hermes": {"approval_policy": ("auto-deny", "x"), "tools_allowed": ([], ["a"], [""], ["a", "a"])},
    "spawn": {"allowed": (True, False), "max_depth": (0, 32), "max_descendants": (0, 10_000)},
    "lifetime": {"ttl_seconds": (1, 60), "unlimited": (True, False), "on_expiry": ("suspend",)},
}
ENTRIES = ("", "network = []", *(f'network = [{{host = "a.com", ports = {p}, protocol = "{q}"}}]'
           for p, q in (("[443]", "tls"), ("[443]", "udp"), ('["442-443"]', "tls"), ("[80, 443]", "tcp"))))  # fmt: skip


def toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def test_combinations_of_modes() -> None:
    accepted = []

    @settings(max_examples=1000, deadline=None)
    @given(st.data())
    def see(data: st.DataObject) -> None:
        accepted.append(accepts(combined(data)))

    see()
    assert sum(accepted) > 20


def combined(data: st.DataObject) -> str:
    out = []
    for section, keys in CHOICES.items():
        drawn = {k: data.draw(st.sampled_from((None, *values))) for k, values in keys.items()}
        body = [f"{k} = {toml(v)}" for k, v in drawn.items() if v is not None]
        if section == "agent":
            body += ['id = "a"', 'name = "A"', 'version = "1"']
        if section == "agent" or data.draw(st.booleans()):
            out += [f"[{section}]", *body]
    out += data.draw(st.sampled_from((["[permissions]", data.draw(st.sampled_from(ENTRIES))], [])))
    if data.draw(st.booleans()):
        out += ["[permissions.filesystem]", data.draw(st.sampled_from(("", 'write = ["/a"]', "write = []")))]
    return "\n".join(out)


PATH_CHARACTERS = st.sampled_from("a/.-@: é\u3000sh256*\u2024e\u0301\ufe0f")
VALIDATED: dict[Callable[..., Any], st.SearchStrategy[Any]] = {
    text.plain: st.text(max_size=8),
    paths.absolute: st.text(PATH_CHARACTERS, max_size=10).map("/{}".format),
    hosts.check: st.one_of(
        st.from_regex(r"(\*\.)?([a-z0-9-]{1,4}\.){0,2}[a-z0-9-]{1,6}", fullmatch=True),
        st.ip_addresses(v=4).map(str),
        st.ip_addresses(v=6).map(str),
        st.from_regex(r"([0-9a-f:]{2,12}|(1[0-9]|2[0-5][0-9])\.0\.0\.0)/[0-9]{1,3}", fullmatch=True),
        st.from_regex(r"::[0-9a-f:]{1,12}", fullmatch=True),
    ),
    hosts.port_ranges: st.lists(
        st.one_of(st.integers(0, 65536), st.from_regex(r"[0-9]{1,5}-[0-9]{1,5}", fullmatch=True)), max_size=3
    ),
    permissions._executable: st.text(PATH_CHARACTERS, max_size=10).map("/{}".format)
    | st.from_regex(r"/[a-z@:]{1,4}@sha256:([0-9a-f]{64}|0{64})", fullmatch=True),
}


@pytest.mark.parametrize("validator", list(VALIDATED), ids=lambda v: v.__name__)
def test_each_check(validator: Callable[..., Any]) -> None:
    schema = jsonschema.Draft202012Validator(shapes.VALIDATORS[validator])
    accepted = []

    @settings(max_examples=400, deadline=None)
    @given(VALIDATED[validator])
    def see(value: Any) -> None:
        try:
            validator(value)
        except PydanticCustomError:
            return
        accepted.append(value)
        assert schema.is_valid(value), value

    see()
    assert len(accepted) > 20, "the generator is too wild to say anything"

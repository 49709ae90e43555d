"""The parser on arbitrary bytes and on spoiled manifests: one refusal of its own kind, or values in range."""

from __future__ import annotations

import pathlib
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import agent, hosts, parse, paths, report, text

FULL = (pathlib.Path(__file__).resolve().parents[3] / "golden" / "manifest" / "full.toml").read_text()
LINES = FULL.splitlines()
SECTIONS = [line for line in LINES if line.startswith("[")]
VALUES = (
    "0", "-1", "1", "65536", "18446744073709551616", "0xffffffffffffffffffff", "1.0", "nan", "true", "false",
    '""', '"x"', '"off"', '"full"', '"host"', '"hermes"', '"node"', '"/"', '"/a"', '"/a/.."',
    '"*.example.com"', '"::1"', '"\\u202e"',
    "[]", "[1]", '["a"]', '["/a", "/a"]', "[[]]", "[{}]", "{}", "{a = 1}", "1979-05-27",
    "07:32:00", "'''\n'''", "off", '"',
)  # fmt: skip


def attempt(raw: bytes) -> agent.Manifest | None:
    """A manifest, or None for a refusal that is well-formed."""
    try:
        return parse.parse(raw)
    except errors.ManifestError as e:
        refusal = e
    assert type(refusal) in (errors.ManifestError, errors.ManifestSyntaxError)
    assert refusal.where.startswith("agent.toml")
    assert refusal.message
    shown = str(refusal) + refusal.hint + str(refusal.to_json())
    assert not any(unicodedata.category(ch) in ("Cc", "Cf", "Cs", "Cn") for ch in shown)
    return None


def assert_in_range(m: agent.Manifest) -> None:
    for section in ("resources", "sandbox", "settlement", "spawn", "lifetime"):
        model = getattr(m, section)
        for key, info in type(model).model_fields.items():
            value = getattr(model, key)
            if isinstance(value, int) and not isinstance(value, bool):
                low, high = report.bounds(info.metadata)
                assert low <= value <= high
    assert paths_ok((*m.permissions.filesystem.read, *m.permissions.filesystem.write))
    for entry in m.permissions.network:
        assert entry.host == hosts.check(entry.host)
        assert entry.ports
        assert all(1 <= low <= high <= 65535 for low, high in entry.ports)
        assert m.resources.network != "off"
    assert not (m.sandbox.required and m.sandbox.backend == "trusted-local")
    assert not (m.permissions.filesystem.write and m.sandbox.filesystem != "host")
    assert not (m.lifetime.unlimited and m.lifetime.ttl_seconds is not None)
    assert m.agent.runtime == "hermes" or paths.relative(m.agent.entry) == m.agent.entry


def paths_ok(given: tuple[str, ...]) -> bool:
    return all(
        p.startswith("/") and p != "/" and not {"", ".", ".."} & set(p[1:].split("/")) and p.isprintable()
        for p in given
    )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_cleanly(raw: bytes) -> None:
    assert attempt(raw) is None


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_arbitrary_text_is_refused_cleanly(document: str) -> None:
    assert attempt(document.encode("utf-8", "surrogatepass")) is None


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_mutations_are_accepted_in_range_or_refused_cleanly(data: st.DataObject) -> None:
    rows = list(LINES)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(rows) - 1))
        match data.draw(st.integers(0, 5)):
            case 0:
                del rows[at]
            case 1:
                rows.insert(at, data.draw(st.sampled_from(LINES)))
            case 2:
                key = rows[at].split("=")[0]
                rows[at] = f"{key}= {data.draw(st.sampled_from(VALUES))}"
            case 3:
                column = data.draw(st.integers(0, len(rows[at])))
                rows[at] = rows[at][:column] + data.draw(st.text(max_size=3)) + rows[at][column:]
            case 4:
                rows[at] = data.draw(st.sampled_from(SECTIONS))
            case _:
                other = data.draw(st.integers(0, len(rows) - 1))
                rows[at], rows[other] = rows[other], rows[at]
        if not rows:
            return
    m = attempt("\n".join(rows).encode("utf-8", "surrogatepass"))
    if m is not None:
        assert_in_range(m)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=1, max_size=4), st.integers(0, len(FULL)), st.integers(0, 4))
def test_bytes_pushed_into_manifest(noise: bytes, at: int, cut: int) -> None:
    raw = FULL.encode()
    m = attempt(raw[:at] + noise + raw[at + cut :])
    if m is not None:
        assert_in_range(m)


def test_unspoiled_manifest_passes_range_check() -> None:
    m = attempt(FULL.encode())
    assert m is not None
    assert_in_range(m)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet=st.sampled_from("a/.-~* \u2215\u2044\uff0f\u2025e\u0301\u202e\\\x00"), max_size=12))
def test_accepted_paths_have_one_spelling(value: str) -> None:
    try:
        path = paths.absolute(value)
    except PydanticCustomError:
        return
    assert path == value
    assert paths_ok((path,))
    assert unicodedata.normalize("NFC", path) == path


@settings(max_examples=500, deadline=None)
@given(st.from_regex(r"[a-zA-Z0-9.*:/%\-_\[\]é]{0,24}", fullmatch=True))
def test_accepted_hosts_have_one_spelling(value: str) -> None:
    try:
        host = hosts.check(value)
    except PydanticCustomError as e:
        hint = (e.context or {})["hint"]
        assert isinstance(hint, str)
        return
    assert host == value == value.lower()
    assert hosts.kind(host) in ("name", "wildcard", "address", "cidr")


def _reference_distance(a: str, b: str) -> int:
    """Damerau-Levenshtein by search: the fewest single edits that turn one into the other."""
    if len(a) > len(b):
        a, b = b, a
    letters = set(a + b)
    reached, steps = {a}, 0
    while b not in reached:
        steps += 1
        reached |= {e for word in reached for e in _edits(word, letters) if len(e) <= len(b) + 1}
    return steps


def _edits(word: str, letters: set[str]) -> set[str]:
    splits = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    return (
        {left + right[1:] for left, right in splits if right}
        | {left + ch + right[1:] for left, right in splits if right for ch in letters}
        | {left + ch + right for left, right in splits for ch in letters}
        | {left + right[1] + right[0] + right[2:] for left, right in splits if len(right) > 1}
    )


@settings(max_examples=60, deadline=None)
@given(st.text("abc", max_size=4), st.text("abc", max_size=4))
def test_distance_is_fewest_edits(a: str, b: str) -> None:
    assert text.distance(a, b) == text.distance(b, a) == _reference_distance(a, b)


@pytest.mark.parametrize("name", list(agent.Manifest.model_fields))
def test_any_single_edit_of_section_name_is_refused(name: str) -> None:
    for slip in sorted(_edits(name, set("aestx"))):
        if slip in agent.Manifest.model_fields or not slip:
            continue
        document = FULL + f"\n[{slip}]\n"
        assert attempt(document.encode()) is None, slip


def test_generated_values_reach_acceptance() -> None:
    """The mutation test would be empty if it never met an accepted manifest: dropping a default line is accepted."""
    assert attempt(FULL.replace("cpu_weight = 200\n", "").encode()) is not None

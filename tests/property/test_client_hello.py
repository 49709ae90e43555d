"""Check that a hello means the same however it is cut, and that an accepted hello has exactly one meaning."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandbox.network.tls.client_hello import CODES, HELLO_BYTES, AnswerReader, Hello, HelloReader, Refused
from tests import hello_kit as kit

_LABELS = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,8}[a-z0-9_])?", fullmatch=True)
_NAMES = st.lists(_LABELS, max_size=4).map(lambda labels: ".".join([*labels, "example"]))
_REAL = (kit.real("api.example.com", alpn=("h2",)), kit.real(None), kit.hello("api.example.com"))


def read(pieces: list[bytes]) -> tuple[Hello | str | None, bytes, bytes]:
    """Read the pieces; return the result, the bytes of the hello and the bytes after it."""
    reader = HelloReader()
    found: Hello | str | None = None
    for index, piece in enumerate(pieces):
        try:
            found = reader.feed(piece)
        except Refused as refusal:
            return refusal.code, b"", b""
        if found is not None:
            return found, reader.raw, reader.rest + b"".join(pieces[index + 1 :])
    return None, b"", b""


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut the data at these places."""
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(st.sampled_from(_REAL), st.lists(st.integers(0, 5000), max_size=8), st.binary(max_size=20))
def test_segments_change_nothing(hello: bytes, places: list[int], after: bytes) -> None:
    assert read(cut(hello + after, places)) == read([hello + after])
    assert read([hello + after])[1:] == (hello, after)


def test_every_single_cut_of_real_hello_changes_nothing() -> None:
    for hello in _REAL:
        whole = read([hello])
        for place in range(len(hello) + 1):
            assert read([hello[:place], hello[place:]]) == whole


@given(st.sampled_from(_REAL), st.lists(st.integers(1, 300), max_size=30))
def test_records_change_nothing(hello: bytes, sizes: list[int]) -> None:
    data = kit.records(hello[5:], sizes)
    assert read([data])[0] == read([hello])[0]
    assert read([bytes([byte]) for byte in data])[0] == read([hello])[0]


@given(
    _NAMES, st.lists(st.tuples(st.integers(44, 60000), st.binary(max_size=40)), max_size=5, unique_by=lambda e: e[0])
)
def test_granted_name_is_found_among_all_extensions(name: str, more: list[tuple[int, bytes]]) -> None:
    extensions = [kit.extension(*one) for one in more]
    for place in range(len(extensions) + 1):
        ordered = [*extensions[:place], kit.server_name(name.upper().encode() + b"."), *extensions[place:]]
        found = read([kit.record(kit.message(kit.body(*ordered)))])[0]
        assert found == Hello(name, ech=False)


@given(st.binary(max_size=200))
@example(b"\x16\x03\x01\x00\x00")
def test_garbage_has_code_or_wants_more(data: bytes) -> None:
    found = read([data])[0]
    assert found is None or isinstance(found, Hello) or found in CODES


@given(st.sampled_from(_REAL), st.data())
@settings(max_examples=300)
def test_changed_byte_never_hides_name(hello: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(hello) - 1))
    changed = hello[:place] + bytes([data.draw(st.integers(0, 255))]) + hello[place + 1 :]
    found, raw, _ = read([changed])
    if isinstance(found, Hello) and found.name is not None:
        # The bytes contain the accepted name as a server would read it.
        assert found.name.encode() in raw.lower()
        assert len(raw) <= HELLO_BYTES + 5


@given(st.booleans(), st.lists(st.integers(0, 200), max_size=6))
def test_segments_of_answer_change_nothing(retry: bool, places: list[int]) -> None:
    data = kit.server_hello(retry=retry)
    reader, said = AnswerReader(), []
    for piece in cut(data, places):
        said.append(reader.feed(piece))
        if said[-1] is not None:
            break
    assert said[-1] is retry

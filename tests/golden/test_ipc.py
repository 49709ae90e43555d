"""One JSON vector of every kind that goes over the socket, as version 1's clients and daemon write it.

Regenerate with `.venv/bin/python -m tests.golden.test_ipc`, and let git show what changed.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from covenant.wire import requests, responses, streams
from tests.golden import ipc_kit

HERE = pathlib.Path(__file__).resolve().parent / "ipc"
SAMPLES = {"requests": ipc_kit.REQUESTS, "responses": ipc_kit.RESPONSES, "streams": ipc_kit.STREAMS}
MODELS: dict[str, set[str]] = {
    "requests": set(requests.KINDS),
    "responses": set(responses.KINDS),
    "streams": set(streams.KINDS),
}
CASES = [(family, kind) for family, samples in SAMPLES.items() for kind in samples]


def document(family: str, kind: str) -> dict[str, Any]:
    return {"kind": kind, **SAMPLES[family][kind]}


def text(family: str, kind: str) -> str:
    return json.dumps(document(family, kind), indent=1) + "\n"


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_vector(family: str, kind: str) -> None:
    assert (HERE / family / f"{kind}.json").read_text() == text(family, kind)


@pytest.mark.parametrize("family", SAMPLES)
def test_every_kind_has_one_vector(family: str) -> None:
    assert {path.stem for path in (HERE / family).iterdir()} == set(SAMPLES[family]) == MODELS[family]


@pytest.mark.parametrize("kind", ipc_kit.REQUESTS)
def test_request_is_read_whole(kind: str) -> None:
    """Nothing of a vector is lost or changed, but for the requests that are not served, which are only known."""
    given = document("requests", kind)
    read = requests.parse(json.dumps(given).encode())
    assert read.kind == kind
    if isinstance(read, requests.Unsupported):
        return
    written = json.loads(read.model_dump_json(by_alias=True))
    assert {name: written[name] for name in given} == given


@pytest.mark.parametrize("kind", ipc_kit.RESPONSES)
def test_response_is_written_as_its_vector(kind: str) -> None:
    given = document("responses", kind)
    assert json.loads(responses.parse(json.dumps(given).encode()).to_bytes()) == given


@pytest.mark.parametrize("kind", ipc_kit.STREAMS)
def test_part_of_stream_is_written_as_its_vector(kind: str) -> None:
    given = document("streams", kind)
    envelope = streams.KINDS[kind].model_validate_json(json.dumps(given))
    assert json.loads(envelope.to_bytes()) == given


@pytest.mark.parametrize("kind", sorted(set(requests.KINDS)))
def test_field_that_nobody_knows_is_ignored(kind: str) -> None:
    given = {**document("requests", kind), "a_field_of_tomorrow": [1]}
    assert requests.parse(json.dumps(given).encode()) == requests.parse(json.dumps(document("requests", kind)).encode())


def main() -> None:
    for family, samples in SAMPLES.items():
        folder = HERE / family
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            if path.stem not in samples:
                path.unlink()
        for kind in samples:
            (folder / f"{kind}.json").write_text(text(family, kind))


if __name__ == "__main__":
    main()

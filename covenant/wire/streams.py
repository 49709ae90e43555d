"""Version 2 of the protocol: a response in parts, for clients that request it with ``prefer_stream``.

``stream_begin``, any number of ``stream_chunk`` counted from 0, then ``stream_end`` or ``stream_error``. A chunk is a
memory record, an audit event, or an agent's text with its sources: version 1 published these as
``covenant.ipc.v2.chunk.memory-record.v1``, ``audit-event.v1`` and ``agent-result.v1``. An error before the first part
is a response of version 1 (``error``). Each stream has an id of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from covenant.wire import requests, responses
from covenant.wire.types import U64, Wire, omitted


class Envelope(Wire):
    """A part of a stream: ``kind`` says which."""

    kind: str
    # A UUID, as version 1's clients decode it.
    stream_id: str

    def to_bytes(self) -> bytes:
        """The JSON of one frame."""
        return self.model_dump_json(by_alias=True).encode()


class StreamBegin(Envelope):
    """A stream of what ``response_kind`` would have held."""

    kind: Literal["stream_begin"] = "stream_begin"
    response_kind: str


class StreamChunk(Envelope):
    """The next part."""

    kind: Literal["stream_chunk"] = "stream_chunk"
    sequence: U64
    chunk: Any


class StreamEnd(Envelope):
    """That was all."""

    kind: Literal["stream_end"] = "stream_end"
    summary: Any = omitted()


class StreamError(Envelope):
    """There is no more, since something failed."""

    kind: Literal["stream_error"] = "stream_error"
    message: str


KINDS: Final[dict[str, type[Envelope]]] = {
    model.model_fields["kind"].default: model for model in (StreamBegin, StreamChunk, StreamEnd, StreamError)
}


def wanted(request: requests.Request) -> bool:
    """Whether the request asks for a stream; only three kinds can."""
    streamed = requests.RecentMemory | requests.RecentAudit | requests.SubmitIntent
    return isinstance(request, streamed) and request.prefer_stream


def envelopes(stream_id: str, response: responses.Response) -> Iterator[Envelope]:
    """The parts of a response that can be streamed; nothing for any other."""
    parts = _parts(response)
    if parts is None:
        return
    chunks, summary = parts
    yield StreamBegin(stream_id=stream_id, response_kind=response.kind)
    for sequence, chunk in enumerate(chunks):
        yield StreamChunk(stream_id=stream_id, sequence=sequence, chunk=chunk)
    yield StreamEnd(stream_id=stream_id, summary=summary)


def _parts(response: responses.Response) -> tuple[Iterator[Any], Any] | None:
    if isinstance(response, responses.Memories):
        return (record.model_dump(mode="json") for record in response.records), None
    if isinstance(response, responses.AuditEvents):
        return (event.model_dump(mode="json") for event in response.events), None
    if isinstance(response, responses.IntentResult):
        document = response.model_dump(mode="json")
        chunk = {"text": document.pop("text"), "sources": document.pop("sources")}
        del document["kind"]
        return iter((chunk,)), document
    return None

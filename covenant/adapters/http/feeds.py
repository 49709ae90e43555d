"""Streams of audit rows, records of memory and intent events, limited to what the caller may see.

A caller that may read old rows may follow new ones, and no others. A row or record passes only if the handler of its
own request would return it. A token or grant that has ended ends the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
from aiohttp import web

from covenant.adapters.http import streams as http_streams
from covenant.adapters.http.streams import Events, Pace
from covenant.handlers.access import authentication, stream_visibility
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state import intent_progress
from covenant.handlers.state.event_feed import Item, Topic
from covenant.handlers.state.intent_progress import IntentEvent
from covenant.wire import requests, responses, streams
from policy import errors

_BEGIN_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Watch:
    """The context of one stream: its caller, token and connection."""

    server: Server
    caller: Caller
    token: str
    request: web.Request
    headers: Mapping[str, str]
    pace: Pace

    def events(self, *, enveloped: bool = True) -> Events:
        """Return a new response for this stream."""
        return Events(self.request, self.headers, self.pace, enveloped=enveloped)

    async def still(self) -> bool:
        """Whether the token still admits the same caller."""
        try:
            return (await authentication.admit(self.server, self.token, "http")).agent == self.caller.agent
        except errors.CovenantError:
            return False


async def recent(
    watch: Watch, asked: requests.RecentAudit | requests.RecentMemory, *, on: bool, seen: str
) -> web.StreamResponse | responses.Response:
    """Stream the existing items, oldest first, and with ``on`` also new ones; ``seen`` is the client's last id.

    Returns a refusal as its response, unchanged.
    """
    topic: Topic = "audit" if isinstance(asked, requests.RecentAudit) else "memory"
    with watch.server.feed.subscribe(topic) as subscription:
        # After the subscription, so that no item is lost between the existing and the new ones.
        answer = await authentication.respond(watch.server, watch.caller, asked)
        if not isinstance(answer, responses.AuditEvents | responses.Memories):
            return answer
        events = watch.events()
        was = oldest_first(answer)
        told = {one.id for one in was}
        ids = [one.id for one in was]
        fresh = was[ids.index(seen) + 1 :] if seen in told else was
        await events.begin(answer.kind)
        for one in fresh:
            await events.chunk(one.model_dump(mode="json", by_alias=True), id=one.id)
        if not on:
            await events.end()
            return events.response

        async def take(item: Item) -> bool:
            if item.value.id not in told and stream_visibility.may_see(watch.server, watch.caller, asked, item.value):
                await events.chunk(item.value.model_dump(mode="json", by_alias=True), id=item.value.id)
            return True

        async def still() -> bool:
            return stream_visibility.may_go_on(watch.server, watch.caller, asked) and await watch.still()

        await http_streams.follow(events, subscription, watch.pace, take=take, still=still)
        return events.response


def oldest_first(answer: responses.AuditEvents | responses.Memories) -> list[Any]:
    """Return rows or records, oldest first; the response has the newest first."""
    return list(reversed(answer.events if isinstance(answer, responses.AuditEvents) else answer.records))


async def submitted(watch: Watch, asked: requests.SubmitIntent) -> web.StreamResponse:
    """Send the start of the stream at once, and version 1's single chunk and end when the intent has ended.

    The id of the first event is the intent's, by which its events can be followed. The intent continues when its client
    disconnects: its result is kept.
    """
    events = watch.events()
    answers: list[responses.Response] = []
    ids: list[str] = []
    begun, done = anyio.Event(), anyio.Event()

    def heard(event: IntentEvent) -> None:
        ids.append(event.intent_id)
        begun.set()

    async def work() -> None:
        intent_progress.HEARD.set(heard)
        try:
            answers.append(await authentication.respond(watch.server, watch.caller, asked))
        finally:
            begun.set()
            done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        with contextlib.suppress(ConnectionError):
            # The intent publishes its id at once, unless it waits for another with the same key.
            with anyio.move_on_after(_BEGIN_SECONDS):
                await begun.wait()
            await events.begin("intent_result", id=ids[0] if ids else "")
            while not done.is_set():
                with anyio.move_on_after(watch.pace.idle_seconds):
                    await done.wait()
                if not done.is_set():
                    await events.nothing_new()
    (answer,) = answers
    if isinstance(answer, responses.Error):
        await events.fail(errors.CovenantError(answer.message))
    for envelope in streams.envelopes("", answer):
        if isinstance(envelope, streams.StreamChunk):
            await events.chunk(envelope.chunk)
        elif isinstance(envelope, streams.StreamEnd):
            await events.end(envelope.summary)
    return events.response


async def of_intent(watch: Watch, intent_id: str, *, extended: bool) -> web.StreamResponse | responses.Response:
    """Stream the past and new events of the caller's intent until it has ended; of an ended intent, only its end.

    Without ``extended`` these are the acts that version 1's clients know, without envelopes.
    """
    with watch.server.feed.subscribe("intent") as subscription:
        was = [one for one in watch.server.live.so_far(intent_id) if stream_visibility.may_follow(watch.caller, one)]
        answer = None
        if not was:
            answer = await authentication.respond(
                watch.server, watch.caller, requests.GetIntentResult(intent_id=intent_id)
            )
            if not isinstance(answer, responses.IntentResult):
                return answer
        events = watch.events(enveloped=extended)

        async def write(one: IntentEvent) -> None:
            if extended or one.type in intent_progress.ACTS:
                await events.chunk(one.to_json(), id=str(one.sequence))

        await events.begin("intent_events")
        for one in was:
            await write(one)
        if isinstance(answer, responses.IntentResult):
            await events.end({"intent_id": intent_id, "status": answer.status})
            return events.response
        last = was[-1].sequence

        async def take(item: Item) -> bool:
            event: IntentEvent = item.value
            if event.intent_id != intent_id or event.sequence <= last:
                return True
            await write(event)
            if event.type == intent_progress.ENDED:
                await events.end({"intent_id": intent_id, "status": event.fields.get("status")})
            return event.type != intent_progress.ENDED

        await http_streams.follow(events, subscription, watch.pace, take=take, still=watch.still)
        return events.response

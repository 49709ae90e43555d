"""A2A over HTTP, driven by the official SDK in both versions of the protocol and in both bindings."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from a2a.utils.errors import TaskNotFoundError
from aiohttp import web

from covenant.adapters.a2a import push
from covenant.keys.identity import Identity
from covenant.runtime.runner import Runners
from covenant.wire.types import AgentId
from tests import a2a_kit, daemon_kit, runtime_kit
from tests.a2a_kit import asks, types
from tests.daemon_kit import Daemon
from tests.mailbox_kit import Runs

pytestmark = pytest.mark.anyio

PEER = AgentId(display="peer@local", pubkey="8opHzTAnfzRpPEx21XtnrVTX28YQuCpAjcn1PczScKh")
FRIEND = Identity(b"\x09" * 32).agent.model_copy(update={"display": "friend@local"})
SENDS = ("memory.write", "a2a.send.upper@agent")
SPOKEN = [(version, binding) for version in ("1.0", "0.3") for binding in ("JSONRPC", "HTTP+JSON")]


class Served:
    """A daemon with an agent that answers in capitals, and its tokens."""

    def __init__(self, daemon: Daemon, runs: Runs, peer_token: str) -> None:
        self.daemon, self.runs, self.peer_token = daemon, runs, peer_token
        self.token = (daemon.home / "peers" / "operator.token").read_text().strip()

    def url(self, agent: str = "upper") -> str:
        return f"http://127.0.0.1:{self.daemon.http_port}/a2a/agents/{agent}"


@asynccontextmanager
async def served(home: Path, **settings: Any) -> AsyncIterator[Served]:
    runs = Runs()
    home.mkdir(mode=0o700)
    runtime_kit.package(home, "upper", name="Upper", required="['memory.write']")

    def prepare(server: Any) -> None:
        server.runners = Runners({"python3": runs})

    async with daemon_kit.running(home, prepare=prepare, http_port=0, **settings) as daemon:
        await daemon.grant(*SENDS)
        made = await daemon.ask("enroll_peer", display=PEER.display, pubkey=PEER.pubkey, actions=["memory.write"])
        yield Served(daemon, runs, made["token_b58"])


def client(one: Served, version: str = "1.0", binding: str = "JSONRPC", **config: Any) -> Any:
    return a2a_kit.client(one.url(), one.token, version=version, binding=binding, **config)


async def first(answers: AsyncIterator[Any]) -> Any:
    found = [one async for one in answers]
    assert len(found) == 1
    return found[0].task


@pytest.mark.parametrize(("version", "binding"), SPOKEN)
async def test_sdk_sends_gets_streams_cancels(covenant_home: Path, version: str, binding: str) -> None:
    async with served(covenant_home) as one, client(one, version, binding, streaming=False) as plain:
        task = await first(plain.send_message(asks("one two", "m1")))
        assert (task.status.state, task.artifacts[0].parts[0].text) == (types.TASK_STATE_COMPLETED, "ONE TWO")
        again = await plain.get_task(types.GetTaskRequest(id=task.id))
        assert (again.id, again.context_id, again.artifacts) == (task.id, task.context_id, task.artifacts)
        # The same message is the same task, which runs once.
        assert (await first(plain.send_message(asks("one two", "m1")))).id == task.id
        assert len(one.runs.asked) == 1
        one.runs.hold = anyio.Event()
        open_task = await first(plain.send_message(asks("three", "m2", return_immediately=True)))
        assert open_task.status.state in (types.TASK_STATE_SUBMITTED, types.TASK_STATE_WORKING)
        ended = await plain.cancel_task(types.CancelTaskRequest(id=open_task.id))
        assert ended.status.state == types.TASK_STATE_CANCELED
        one.runs.hold = None
        async with client(one, version, binding, streaming=True) as streaming:
            kinds = [e.WhichOneof("payload") async for e in streaming.send_message(asks("four", "m3"))]
        assert kinds[0] == "task"
        assert kinds[-2:] == ["artifact_update", "status_update"]
        with pytest.raises(TaskNotFoundError):
            await plain.get_task(types.GetTaskRequest(id="none"))


async def rpc(one: Served, method: str, params: Any, *, token: str | None = None) -> dict[str, Any]:
    return await a2a_kit.rpc(one.url(), token or one.token, method, params)


def message(text: str, name: str) -> dict[str, Any]:
    return {"message": {"messageId": name, "role": "user", "parts": [{"kind": "text", "text": text}]}}


async def test_tokens_and_grants_decide(covenant_home: Path) -> None:
    async with served(covenant_home) as one:
        async with httpx.AsyncClient() as http:
            card = f"{one.url()}/.well-known/agent-card.json"
            bare = await http.get(card)
            assert (bare.status_code, bare.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
            assert bare.headers["WWW-Authenticate"] == "Bearer"
            assert (await http.post(one.url(), json={})).json()["error"]["data"][0]["reason"] == "UNAUTHENTICATED"
            own = {"Authorization": f"Bearer {one.token}"}
            assert (await http.get(card, headers=own)).json()["skills"][0]["id"] == "upper"
            assert (await http.get(card.replace("upper", "absent"), headers=own)).status_code == 404
            assert (await http.get(card, headers={**own, "Origin": "https://evil.example"})).status_code == 403
            assert (await http.get(card, headers={**own, "Host": "evil.example"})).status_code == 421
        mine = (await rpc(one, "message/send", message("one", "m")))["result"]
        refused = await rpc(one, "message/send", message("one", "m"), token=one.peer_token)
        assert (refused["status"], refused["id"]) == (403, 7)
        assert "a2a.send.upper@agent" in refused["error"]["message"]
        await one.daemon.grant(f"a2a.recv.{FRIEND.display}")
        friend = {"display": FRIEND.display, "pubkey": FRIEND.pubkey, "actions": SENDS}
        token = (await one.daemon.ask("enroll_peer", **friend))["token_b58"]
        theirs = (await rpc(one, "message/send", message("one", "m"), token=token))["result"]
        # The same message of another caller is another task, and no caller reaches another's by its id.
        assert theirs["id"] != mine["id"]
        for method in ("tasks/get", "tasks/cancel", "tasks/resubscribe", "GetTask", "CancelTask"):
            answer = await rpc(one, method, {"id": mine["id"]}, token=token)
            assert answer["error"]["code"] == -32001, method
        assert (await rpc(one, "tasks/get", {"id": mine["id"]}))["result"] == mine
        listed = (await rpc(one, "ListTasks", {}, token=token))["result"]
        assert [task["id"] for task in listed["tasks"]] == [theirs["id"]]
        rows = (await one.daemon.ask("recent_audit", limit=200))["events"]
        sent = [row["kind"] for row in rows if row["kind"]["type"] == "a2_a_task_sent"]
        assert {row["task_kind"] for row in sent} == {"a2a.message"}
        assert all(len(row["intent_hash_hex"]) == 64 for row in sent)


class Receiver:
    """An HTTP server of the loopback that keeps what is posted to it; `/moved` answers with a redirect."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, str], Any]] = []

    async def take(self, request: web.Request) -> web.Response:
        self.heard.append((request.path, dict(request.headers), await request.json()))
        if request.path == "/hook/moved":
            return web.Response(status=307, headers={"Location": "/hook/elsewhere"})
        return web.Response()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        finally:
            await runner.cleanup()


async def outcomes(one: Served, count: int) -> list[str]:
    """The outcomes of so many push notifications, oldest first."""
    with anyio.fail_after(60):
        while True:
            rows = (await one.daemon.ask("recent_audit", limit=200))["events"]
            found = [row["kind"]["outcome"] for row in rows if row["kind"]["type"] == "a2_a_push_sent"]
            if len(found) >= count:
                return found[::-1]
            await anyio.sleep(0.02)


async def test_push_goes_to_listed_urls_alone(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "RETRY_SECONDS", ())
    receiver = Receiver()
    async with receiver.listening() as port:
        base = f"http://127.0.0.1:{port}"
        listed = (f"{base}/hook", f"http://localhost:{port}/hook")
        async with served(covenant_home, a2a_push_urls=listed) as one:
            for version, method in (("1.0", "SendMessage"), ("0.3", "message/send")):
                name = "taskPushNotificationConfig" if version == "1.0" else "pushNotificationConfig"
                config = {"url": f"{base}/hook/{version}", "token": "sesame"}
                asked = {**message("one", version), "configuration": {name: config}}
                assert (await rpc(one, method, asked))["result"]
            assert set(await outcomes(one, 2)) == {"delivered"}
            ends = {path: body for path, headers, body in receiver.heard if headers["X-A2A-Notification-Token"]}
            assert ends["/hook/1.0"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
            assert ends["/hook/0.3"]["status"]["state"] == "completed"
            # The grip of each refusal: the same message with a listed URL was taken.
            for url in (
                f"{base}/hooks",
                f"{base}/hook/../x",
                f"{base}/",
                "http://169.254.169.254/",
                f"http://x@{base[7:]}",
            ):
                asked = {**message("one", url), "configuration": {"taskPushNotificationConfig": {"url": url}}}
                assert (await rpc(one, "SendMessage", asked))["error"]["code"] == -32602, url
            before = len(await outcomes(one, 2))
            for url in (f"http://localhost:{port}/hook/name", f"{base}/hook/moved"):
                asked = {**message("one", url), "configuration": {"taskPushNotificationConfig": {"url": url}}}
                assert (await rpc(one, "SendMessage", asked))["result"]
            assert {"refused", "failed"} <= set((await outcomes(one, before + 2))[before:])
            assert {path for path, _, _ in receiver.heard}.isdisjoint({"/hook/name", "/hook/elsewhere"})
            one.runs.hold = anyio.Event()
            async with client(one, streaming=False) as sdk:
                task = await first(sdk.send_message(asks("two", "held", return_immediately=True)))
                made = await sdk.create_task_push_notification_config(
                    types.TaskPushNotificationConfig(task_id=task.id, url=f"{base}/hook/sdk", id="mine")
                )
                assert (made.id, made.url) == ("mine", f"{base}/hook/sdk")
                ask = types.GetTaskPushNotificationConfigRequest(task_id=task.id, id="mine")
                assert (await sdk.get_task_push_notification_config(ask)).id == "mine"
                every = types.ListTaskPushNotificationConfigsRequest(task_id=task.id)
                assert len((await sdk.list_task_push_notification_configs(every)).configs) == 1
                for number in (1, 1, 2, 3):
                    more = types.TaskPushNotificationConfig(task_id=task.id, url=f"{base}/hook/{number}")
                    await sdk.create_task_push_notification_config(more)
                # The same once more is no second one, and another is one too many.
                assert len((await sdk.list_task_push_notification_configs(every)).configs) == push.MOST_OF_TASK
                fifth = {"taskId": task.id, "url": f"{base}/hook/4"}
                assert (await rpc(one, "CreateTaskPushNotificationConfig", fifth))["status"] == 429
                for config in (await sdk.list_task_push_notification_configs(every)).configs:
                    if config.id != "mine":
                        other = types.DeleteTaskPushNotificationConfigRequest(task_id=task.id, id=config.id)
                        await sdk.delete_task_push_notification_config(other)
                gone = types.DeleteTaskPushNotificationConfigRequest(task_id=task.id, id="mine")
                await sdk.delete_task_push_notification_config(gone)
                assert not (await sdk.list_task_push_notification_configs(every)).configs
            one.runs.hold.set()


@pytest.mark.parametrize("ends", ["configuration", "token"])
async def test_push_that_is_withdrawn_is_not_tried_again(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(push, "RETRY_SECONDS", (1.0,) * 60)
    receiver = Receiver()
    async with receiver.listening() as port:
        url = f"http://127.0.0.1:{port}/hook/moved"
        async with served(covenant_home, a2a_push_urls=(url,)) as one:
            await one.daemon.grant(f"a2a.recv.{FRIEND.display}")
            friend = {"display": FRIEND.display, "pubkey": FRIEND.pubkey, "actions": SENDS}
            token = (await one.daemon.ask("enroll_peer", **friend))["token_b58"]
            config = {"taskPushNotificationConfig": {"url": url, "id": "c"}, "returnImmediately": True}
            one.runs.hold = anyio.Event()
            sent = await rpc(one, "SendMessage", {**message("one", "1.0"), "configuration": config}, token=token)
            with anyio.fail_after(60):
                while not receiver.heard:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            if ends == "token":
                await one.daemon.ask("revoke_peer", token_prefix=token[:6])
            else:
                named = {"taskId": sent["result"]["task"]["id"], "id": "c"}
                assert (await rpc(one, "DeleteTaskPushNotificationConfig", named, token=token))["status"] == 200
            before = len(receiver.heard)
            # The operator does not see a peer's rows by this request.
            found: list[Any] = []
            with anyio.fail_after(60):
                while not found:
                    rows = await one.daemon.server.audit.recent(200, issuer_pubkey=FRIEND.pubkey)
                    found = [row.kind["outcome"] for row in rows if row.kind["type"] == "a2_a_push_sent"]
                    await anyio.sleep(0.02)
            assert found == ["withdrawn"]
            assert len(receiver.heard) <= before + 1  # the attempt that was under way
            one.runs.hold.set()


async def test_hostile_messages_cost_an_error(covenant_home: Path) -> None:
    async with served(covenant_home) as one:
        same = [await rpc(one, "message/send", message(text, "same")) for text in ("one", "two", "one")]
        ids = [answer["result"]["id"] for answer in same]
        assert (ids[0], len(set(ids))) == (ids[2], 2)
        assert [answer["result"]["artifacts"][0]["parts"][0]["text"] for answer in same] == ["ONE", "TWO", "ONE"]
        for method, code in (("GetExtendedAgentCard", -32004), ("agent/getAuthenticatedExtendedCard", -32007)):
            assert (await rpc(one, method, {}))["error"]["code"] == code
        assert (await rpc(one, "ListTaskPushNotificationConfigs", {"taskId": "none"}))["error"]["code"] == -32003
        deep: Any = "x"
        for _ in range(80):
            deep = [deep]
        wrong = {
            "parts": [{"data": deep}],
            "large": [{"text": "x" * (1 << 21)}],
            "halves": [{"text": "\ud800"}],
            "many": [{"text": ""}] * 40_000,
        }
        for name, parts in wrong.items():
            asked = {"message": {"messageId": name, "role": "user", "parts": parts}}
            assert (await rpc(one, "message/send", asked))["error"]["code"] in (-32602, -32700), name
        assert (await rpc(one, "message/send", {**message("x", "m"), "unknown": "t"}))["result"]
        asked = message("more", "m2")
        asked["message"]["taskId"] = (await rpc(one, "message/send", message("one", "same")))["result"]["id"]
        assert (await rpc(one, "message/send", asked))["error"]["code"] == -32004
        # A page, and the next one.
        first_page = (await rpc(one, "ListTasks", {"pageSize": 1}))["result"]
        assert (len(first_page["tasks"]), first_page["totalSize"]) == (1, 3)
        token = first_page["nextPageToken"]
        rest = (await rpc(one, "ListTasks", {"pageToken": token, "status": "TASK_STATE_COMPLETED"}))["result"]
        assert [task["id"] for task in rest["tasks"]] != [task["id"] for task in first_page["tasks"]]
        assert (await rpc(one, "ListTasks", {"pageToken": "none"}))["error"]["code"] == -32602


async def test_answer_of_waiting_send_ends_with_token(covenant_home: Path) -> None:
    async with served(covenant_home) as one, anyio.create_task_group() as group:
        one.runs.hold = anyio.Event()
        friend = {"display": FRIEND.display, "pubkey": FRIEND.pubkey, "actions": SENDS}
        token = (await one.daemon.ask("enroll_peer", **friend))["token_b58"]
        await one.daemon.grant(f"a2a.recv.{FRIEND.display}")
        found: list[Any] = []

        async def send() -> None:
            found.append(await rpc(one, "message/send", message("one", "m"), token=token))

        group.start_soon(send)
        with anyio.fail_after(60):
            while not (await rpc(one, "ListTasks", {}, token=token))["result"]["tasks"]:  # noqa: ASYNC110
                await anyio.sleep(0.05)
        await one.daemon.ask("revoke_peer", token_prefix=token[:6])
        one.runs.hold.set()
        with anyio.fail_after(60):
            while not found:  # noqa: ASYNC110
                await anyio.sleep(0.05)
        assert (found[0]["status"], "result" in found[0]) == (401, False)


@pytest.mark.parametrize(("name", "waits"), [("had ended", True), ("new", True), ("new", False)])
async def test_token_revoked_before_body_came_does_nothing(covenant_home: Path, name: str, waits: bool) -> None:
    """The body is waited for after the token was let in, which the 100 says. The first task had ended before."""
    async with served(covenant_home) as one:
        friend = {"display": FRIEND.display, "pubkey": FRIEND.pubkey, "actions": SENDS}
        token = (await one.daemon.ask("enroll_peer", **friend))["token_b58"]
        await one.daemon.grant(f"a2a.recv.{FRIEND.display}")
        first = await rpc(one, "message/send", message("one", "had ended"), token=token)
        assert first["result"]["status"]["state"] == "completed"
        # The control: the same bytes with a token that is not revoked.
        assert b'"completed"' in await _slowly(one, token, message("one", "had ended"), anyio.lowlevel.checkpoint)
        revoke = functools.partial(one.daemon.ask, "revoke_peer", token_prefix=token[:6])
        asked = {**message("one", name), "configuration": {"blocking": waits}}
        answer = await _slowly(one, token, asked, revoke)
        assert answer.startswith(b"HTTP/1.1 401 "), answer
        assert b'"result"' not in answer
        assert [text for _, text, _ in one.runs.asked] == ["one"]


async def _slowly(one: Served, token: str, params: Any, between: Callable[[], Awaitable[Any]]) -> bytes:
    """Send a message whose body comes after ``between``, which is called once the token was let in."""
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": params}).encode()
    url = httpx.URL(one.url())
    head = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    with anyio.fail_after(60):
        async with await anyio.connect_tcp(url.host, url.port or 80) as line:
            await line.send(head.encode())
            assert await line.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await between()
            await line.send(body)
            answer = b""
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    answer += await line.receive()
    return answer


async def test_streams_are_counted_and_end_with_token(covenant_home: Path) -> None:
    """A caller with too many streams is told so, a stream of a revoked token ends, and a stopped daemon ends all."""
    async with served(covenant_home) as one:
        one.runs.hold = anyio.Event()
        friend = {"display": FRIEND.display, "pubkey": FRIEND.pubkey, "actions": SENDS}
        token = (await one.daemon.ask("enroll_peer", **friend))["token_b58"]
        await one.daemon.grant(f"a2a.recv.{FRIEND.display}")
        body = {"jsonrpc": "2.0", "id": 1, "method": "message/stream", "params": message("one", "m")}
        async with a2a_kit.http(token) as http:
            answers = [
                await http.send(http.build_request("POST", one.url(), json=body), stream=True) for _ in range(32)
            ]
            assert {answer.status_code for answer in answers} == {200}
            for method in ("message/stream", "message/send"):
                more = await rpc(one, method, message("none", "other"), token=token)
                assert (more["status"], more["error"]["data"][0]["reason"]) == (429, "RESOURCE_EXHAUSTED")
            # Nothing was sent with them.
            assert len((await rpc(one, "ListTasks", {}, token=token))["result"]["tasks"]) == 1
            await one.daemon.ask("revoke_peer", token_prefix=token[:6])
            with anyio.fail_after(60):
                for answer in answers:
                    assert b"canceled" in await answer.aread() or answer.is_closed

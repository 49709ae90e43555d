"""The official SDKs of OpenAI, Anthropic, Google and Ollama in a sandbox, pinned: each call is answered at the gate.

They are those of Python, and the first two also of node. Ollama's client is shown beside it at the server itself. pip
and npm install them without any script of theirs being run, and they are loaded in a sandbox alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import ollama_server
from tests.kernel import installed_packages
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.test_credentials import vault
from tests.kernel.world import World

WHEELS = Path(__file__).with_name("sdk_wheels.txt")
MODULES = Path(__file__).with_name("sdk_modules.json")
PROVIDERS = """
[providers.local]
kind = "mock"

[providers.keyed]
kind = "openai"
endpoint = "{url}"
secret = "keyed"

[providers.ollama]
kind = "ollama"
endpoint = "{ollama}"
"""
GRANTED = """[services.models]
allow = [{{ provider = "local", models = ["test-*"] }}, {{ provider = "keyed", models = ["gpt-*"] }}]
[permissions.filesystem]
read = ["{place}"]
"""
MODELS_OF_OLLAMA = """[services.models]
allow = [{{ provider = "ollama", models = ["llama3.2"] }}]
[[permissions.network]]
host = "host.covenant"
ports = [{port}]
protocol = "tcp"
[permissions.filesystem]
read = ["{place}"]
"""
BEGIN = """
import sys
sys.path.insert(0, PLACE)
said = [{"role": "user", "content": "two words"}]
"""
OPENAI = """
import openai
client = openai.OpenAI(base_url="http://models.covenant/v1", api_key="none", max_retries=0)
def chunks(model, **more):
    return list(client.chat.completions.create(model=model, messages=said, stream=True, **more))
whole = client.chat.completions.create(model="test-1", messages=said)
parts = chunks("test-1", stream_options={"include_usage": True})
response = client.responses.create(model="test-1", input="two words")
with client.responses.stream(model="test-1", input="two words") as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_response()
embedded = client.embeddings.create(model="test-1", input="two words", encoding_format="float")
keyed = client.chat.completions.create(model="gpt-1", messages=said)
def failed(kind, **more):
    try:
        client.chat.completions.create(messages=said, **more)
    except kind as e:
        return [e.status_code, e.code]
    return "none"
async def asynchronous():
    async with openai.AsyncOpenAI(base_url="http://models.covenant/v1", api_key="none", max_retries=0) as own:
        stream = await own.chat.completions.create(model="test-1", messages=said, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in stream])
import asyncio
answer = {
    "whole": whole.choices[0].message.content, "tokens": whole.usage.total_tokens,
    "parts": [part.choices[0].delta.content for part in parts if part.choices and part.choices[0].delta.content],
    "counted": parts[-1].usage.total_tokens, "response": response.output_text, "kinds": kinds,
    "final": final.output_text, "embedded": len(embedded.data[0].embedding),
    "models": [one.id for one in client.models.list()],
    "keyed": keyed.choices[0].message.content,
    "streamed": [part.choices[0].delta.content for part in chunks("gpt-1") if part.choices],
    "refused": failed(openai.PermissionDeniedError, model="other"),
    "asynchronous": asyncio.run(asynchronous()),
    "key": KEY in str(dict(os.environ)) + repr(client.__dict__),
}
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(base_url="http://models.covenant", api_key="none", max_retries=0)
asked = {"model": "test-1", "max_tokens": 100, "messages": said}
whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    texts = list(stream.text_stream)
    final = stream.get_final_message()
count = client.messages.count_tokens(model="test-1", messages=said)
try:
    client.messages.create(**{**asked, "model": "other"})
except anthropic.PermissionDeniedError as e:
    refused = [e.status_code, e.body["error"]["type"]]
answer = {
    "whole": whole.content[0].text, "tokens": whole.usage.output_tokens, "texts": texts,
    "final": [final.content[0].text, final.stop_reason, final.usage.output_tokens],
    "count": count.input_tokens, "models": [one.id for one in client.models.list()], "refused": refused,
}
"""
GEMINI = """
from google import genai
client = genai.Client(api_key="none", http_options={"base_url": "http://models.covenant"})
whole = client.models.generate_content(model="test-1", contents="two words")
pieces = [one.text for one in client.models.generate_content_stream(model="test-1", contents="two words")]
count = client.models.count_tokens(model="test-1", contents="two words")
vectors = client.models.embed_content(model="test-1", contents=["two", "words"]).embeddings
try:
    client.models.generate_content(model="other", contents="two words")
except genai.errors.ClientError as e:
    refused = [e.code, e.status]
answer = {
    "whole": whole.text, "tokens": whole.usage_metadata.candidates_token_count, "pieces": pieces,
    "counted": count.total_tokens > 0, "vectors": [len(vectors), vectors[0].values != vectors[1].values],
    "refused": refused,
}
"""
# Once at the server, by the one port of the host that is granted, and once at the gate.
OLLAMA = """
import ollama
def failed(call, **words):
    try:
        call(**words)
    except ollama.ResponseError as e:
        return [e.status_code, e.error]
    return "none"
def asked(place):
    client = ollama.Client(host=place)
    chat = client.chat(model="llama3.2", messages=said, options={"num_predict": 50, "temperature": 0})
    parts = list(client.chat(model="llama3.2", messages=said, stream=True))
    whole = client.generate(model="llama3.2", prompt="two words")
    pieces = list(client.generate(model="llama3.2", prompt="two words", stream=True))
    vectors = client.embed(model="llama3.2", input=["two", "words"])
    return {
        "chat": [chat.message.role, chat.message.content, chat.done_reason, chat.eval_count],
        "timed": min(chat.total_duration, chat.eval_duration, chat.prompt_eval_count) > 0,
        "parts": [one.message.content for one in parts], "done": [one.done for one in parts],
        "ended": [parts[-1].done_reason, parts[-1].eval_count],
        "whole": [whole.response, whole.done], "pieces": [one.response for one in pieces],
        "vectors": [len(vectors.embeddings), vectors.embeddings[0] != vectors.embeddings[1]],
        "loaded": client.generate(model="llama3.2").done_reason, "left": client.chat(model="llama3.2").done_reason,
        "absent": failed(client.chat, model="absent", messages=said),
        "tools": failed(client.chat, model="llama3.2", messages=said, tools=[{"function": {"name": "f"}}]),
        "thinks": failed(client.generate, model="llama3.2", prompt="a", think=True),
    }
direct = ollama.Client(host=SERVER)
async def asynchronous():
    stream = await ollama.AsyncClient(host="http://models.covenant").chat(model="llama3.2", messages=said, stream=True)
    return [part.message.content async for part in stream]
import asyncio
shown = direct.show("llama3.2")
answer = {
    "server": asked(SERVER), "gate": asked("http://models.covenant"), "asynchronous": asyncio.run(asynchronous()),
    "listed": [[one.model for one in client.list().models] for client in (direct, ollama.Client("http://models.covenant"))],
    "shown": [shown.details.family, "completion" in shown.capabilities], "running": len(direct.ps().models),
    "old": len(direct.embeddings(model="llama3.2", prompt="two").embedding),
    "pulls": failed(direct.pull, model="absent")[0],
}
"""
WORDS = ["mock:", " two", " words"]
NODE = """
const { createRequire } = require("module");
const there = createRequire(PLACE + "/");
const { OpenAI } = there("openai");
const Anthropic = there("@anthropic-ai/sdk");
const said = [{ role: "user", content: "two words" }];
const text = (parts) => parts.map((part) => part.choices[0]?.delta.content).filter(Boolean);
async function all(stream) {
  const found = [];
  for await (const part of stream) found.push(part);
  return found;
}
async function failed(call) {
  try {
    await call();
    return "none";
  } catch (e) {
    return [e.constructor.name, e.status];
  }
}
async function asked() {
  const client = new OpenAI({ baseURL: "http://models.covenant/v1", apiKey: "none", maxRetries: 0 });
  const chat = (more) => client.chat.completions.create({ model: "test-1", messages: said, ...more });
  const claude = new Anthropic({ baseURL: "http://models.covenant", apiKey: "none", maxRetries: 0 });
  const message = { model: "test-1", max_tokens: 100, messages: said };
  const whole = await chat({});
  const response = await client.responses.create({ model: "test-1", input: "two words" });
  const events = await all(await client.responses.create({ model: "test-1", input: "two words", stream: true }));
  const keyed = await chat({ model: "gpt-1" });
  const answer = await claude.messages.create(message);
  const stream = claude.messages.stream(message);
  const texts = [];
  stream.on("text", (piece) => texts.push(piece));
  const final = await stream.finalMessage();
  return {
    whole: whole.choices[0].message.content, parts: text(await all(await chat({ stream: true }))),
    response: response.output_text, last: events.at(-1).type, keyed: keyed.choices[0].message.content,
    streamed: text(await all(await chat({ model: "gpt-1", stream: true }))),
    refused: await failed(() => chat({ model: "other" })),
    answer: answer.content[0].text, texts, final: [final.content[0].text, final.stop_reason],
    refusedThere: await failed(() => claude.messages.create({ ...message, model: "other" })),
    key: JSON.stringify(process.env).includes(KEY),
  };
}
require("readline").createInterface({ input: process.stdin }).once("line", async () => {
  const answer = await asked().catch((e) => ({ failed: String(e.stack) }));
  process.stdout.write(JSON.stringify({ text: JSON.stringify(answer) }) + "\\n", () => process.exit(0));
});
"""


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    with installed_packages.wheels(WHEELS) as made:
        yield made


@pytest.fixture(scope="module")
def ollama() -> Iterator[str]:
    with ollama_server.running("llama3.2") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, provider: Provider, ollama: str) -> World:
    base = tmp_path_factory.mktemp("sdks")
    made = World(base)
    made.configure(**{"host_ports": [int(ollama.rpartition(":")[2])], "vault.key": str(base / "vault.key")})
    vault(made, "init")
    vault(made, "put", "covenant-providers", "keyed", secret=KEY + "\n")
    (made.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url, ollama=ollama))
    return made


def ask(world: World, place: Path, code: str) -> Any:
    head = f"PLACE, KEY = {str(place)!r}, {KEY[:12]!r}" + BEGIN
    more = GRANTED.format(place=place.parent)
    return world.ask(head + code, more=more, memory_mb=1024, cpu_ms=120_000, resources="cpu_millis = 2000")


def test_openai_sdk_works_without_key(world: World, installed: Path, provider: Provider) -> None:
    found = ask(world, installed, OPENAI)
    assert found.pop("kinds")[-1] == "response.completed"
    assert found.pop("tokens") > 0
    assert found.pop("counted") > 0
    assert found == {
        "whole": "mock: two words",
        "parts": WORDS,
        "response": "mock: two words",
        "final": "mock: two words",
        "embedded": 8,
        "models": [],
        "keyed": f"from {provider.server_port}",
        "streamed": ["part0 ", "part1 ", "part2 "],
        "refused": [403, "model_not_granted"],
        "asynchronous": "mock: two words",
        "key": False,
    }
    assert [one["headers"]["authorization"] for one in provider.seen] == [f"Bearer {KEY}"] * 2
    assert KEY not in json.dumps(world.rows())


def test_anthropic_sdk_works_without_key(world: World, installed: Path) -> None:
    found = ask(world, installed, ANTHROPIC)
    assert found.pop("count") > 0
    assert found == {
        "whole": "mock: two words",
        "tokens": 3,
        "texts": WORDS,
        "final": ["mock: two words", "end_turn", 3],
        "models": [],
        "refused": [403, "permission_error"],
    }


def test_google_sdk_works_without_key(world: World, installed: Path) -> None:
    assert ask(world, installed, GEMINI) == {
        "whole": "mock: two words",
        "tokens": 3,
        "pieces": WORDS,
        "counted": True,
        "vectors": [2, True],
        "refused": [403, "PERMISSION_DENIED"],
    }


def test_ollama_client_sees_server_and_gate_alike(world: World, installed: Path, ollama: str) -> None:
    port = ollama.rpartition(":")[2]
    head = f"PLACE, SERVER = {str(installed)!r}, 'http://host.covenant:{port}'" + BEGIN
    more = MODELS_OF_OLLAMA.format(place=installed.parent, port=port)
    found = world.ask(head + OLLAMA, more=more, memory_mb=1024, cpu_ms=120_000, resources="cpu_millis = 2000")
    common = {
        "chat": ["assistant", "mock: two words", "stop", 3],
        "timed": True,
        "parts": [*WORDS, ""],
        "done": [False, False, False, True],
        "ended": ["stop", 3],
        "whole": ["mock: two words", True],
        "pieces": [*WORDS, ""],
        "vectors": [2, True],
        "loaded": "load",
        "left": "load",
        "tools": [400, '"llama3.2" does not support tools'],
        "thinks": [400, '"llama3.2" does not support thinking'],
    }
    assert found == {
        "server": {**common, "absent": [404, "model 'absent' not found"]},
        "gate": {**common, "absent": [403, "the model `absent` is not granted"]},
        "asynchronous": [*WORDS, ""],
        "listed": [["llama3.2:latest"], ["llama3.2"]],
        "shown": ["llama", True],
        "running": 0,
        "old": 8,
        "pulls": 404,
    }


@pytest.fixture(scope="module")
def modules() -> Iterator[Path]:
    with installed_packages.modules(MODULES) as made:
        yield made


def test_node_sdks_work_without_key(world: World, modules: Path, provider: Provider) -> None:
    provider.seen.clear()
    head = f"const PLACE = {json.dumps(str(modules))}, KEY = {json.dumps(KEY[:12])};\n"
    package = world.package(
        {"main.js": head + NODE}, name="node-sdks", id="node-sdks", runtime="node", entry="main.js",
        more=GRANTED.format(place=modules), memory_mb=1024, cpu_ms=120_000, resources="cpu_millis = 2000",
    )  # fmt: skip
    done = world.run(world.sign(package))
    assert done.result is not None, (done.error, done.stderr)
    assert json.loads(done.result.text) == {
        "whole": "mock: two words",
        "parts": WORDS,
        "response": "mock: two words",
        "last": "response.completed",
        "keyed": f"from {provider.server_port}",
        "streamed": ["part0 ", "part1 ", "part2 "],
        "refused": ["PermissionDeniedError", 403],
        "answer": "mock: two words",
        "texts": WORDS,
        "final": ["mock: two words", "end_turn"],
        "refusedThere": ["PermissionDeniedError", 403],
        "key": False,
    }
    assert [one["headers"]["authorization"] for one in provider.seen] == [f"Bearer {KEY}"] * 2

"""Requests of the four APIs that the gate speaks, told apart by method and path, and judged before they are passed on.

Only what is listed here passes: an operation, a key of its body, a type of content, a kind of tool. A provider would do
more for the operator's key than answer: fetch a URL, run a search, read a stored file, ask another model. Each of these
would be a way out of a sandbox without a network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

Shape = Literal["openai", "anthropic", "gemini", "ollama"]
Operation = Literal["generate", "embed", "count", "list", "version"]
Body = dict[str, Any]

# What each kind of provider speaks.
SPOKEN: Final[Mapping[str, tuple[Shape, ...]]] = {
    "anthropic": ("anthropic",),
    "gemini": ("gemini",),
    "mock": ("openai", "anthropic", "gemini", "ollama"),
    "ollama": ("ollama", "openai"),
    "openai": ("openai",),
    "openai-compatible": ("openai",),
}


class ApiRoute(Struct, frozen=True):
    """One operation. ``keys`` are the keys that its body may have; ``limits`` those that bound its answer."""

    shape: Shape
    operation: Operation
    keys: frozenset[str] = frozenset()
    limits: tuple[str, ...] = ()


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAMPLING = "temperature top_p seed stop frequency_penalty presence_penalty logit_bias user metadata n stream"
_CHAT: Final = _keys(
    f"model messages {_SAMPLING} stream_options max_tokens max_completion_tokens logprobs top_logprobs tools"
    " tool_choice parallel_tool_calls response_format reasoning_effort verbosity service_tier store safety_identifier"
    " prompt_cache_key functions function_call modalities audio prediction top_k min_p repetition_penalty"
)
_RESPONSES: Final = _keys(
    "model input instructions stream max_output_tokens temperature top_p tools tool_choice parallel_tool_calls text"
    " reasoning truncation user metadata store include service_tier safety_identifier prompt_cache_key top_logprobs"
    " stream_options max_tool_calls client_metadata"
)
_MESSAGES: Final = _keys(
    "model messages system max_tokens stream temperature top_p top_k stop_sequences tools tool_choice thinking metadata"
    " service_tier cache_control output_config output_format context_management speed"
)
_GEMINI: Final = _keys(
    "contents systemInstruction system_instruction generationConfig generation_config safetySettings safety_settings"
    " tools toolConfig tool_config model labels"
)
_ROUTES: Final[Mapping[tuple[str, str], ApiRoute]] = {
    ("POST", "/v1/chat/completions"): ApiRoute("openai", "generate", _CHAT, ("max_completion_tokens", "max_tokens")),
    ("POST", "/v1/completions"): ApiRoute(
        "openai",
        "generate",
        _keys(f"model prompt suffix {_SAMPLING} stream_options max_tokens logprobs echo best_of"),
        ("max_tokens",),
    ),
    ("POST", "/v1/responses"): ApiRoute("openai", "generate", _RESPONSES, ("max_output_tokens",)),
    ("POST", "/v1/embeddings"): ApiRoute(
        "openai", "embed", _keys("model input encoding_format dimensions user input_type")
    ),
    ("GET", "/v1/models"): ApiRoute("openai", "list"),
    ("POST", "/v1/messages"): ApiRoute("anthropic", "generate", _MESSAGES, ("max_tokens",)),
    ("POST", "/v1/messages/count_tokens"): ApiRoute("anthropic", "count", _MESSAGES),
    ("POST", "/api/chat"): ApiRoute(
        "ollama", "generate", _keys("model messages tools format options stream keep_alive think"), ("num_predict",)
    ),
    ("POST", "/api/generate"): ApiRoute(
        "ollama",
        "generate",
        _keys("model prompt suffix images format options system template stream raw keep_alive context think"),
        ("num_predict",),
    ),
    ("POST", "/api/embed"): ApiRoute("ollama", "embed", _keys("model input truncate options keep_alive dimensions")),
    ("GET", "/api/tags"): ApiRoute("ollama", "list"),
    ("GET", "/api/version"): ApiRoute("ollama", "version"),
    ("GET", "/v1beta/models"): ApiRoute("gemini", "list"),
}
_GEMINI_PATH: Final = re.compile(
    # The version is of the client: the provider's is in its endpoint.
    r"/v1(?:beta)?/models/([A-Za-z0-9][A-Za-z0-9._-]{0,127})"
    r":(generateContent|streamGenerateContent|countTokens|embedContent|batchEmbedContents)"
)
_GEMINI_VERBS: Final[Mapping[str, ApiRoute]] = {
    "generateContent": ApiRoute("gemini", "generate", _GEMINI, ("maxOutputTokens",)),
    "streamGenerateContent": ApiRoute("gemini", "generate", _GEMINI, ("maxOutputTokens",)),
    "countTokens": ApiRoute("gemini", "count", _GEMINI),
    "embedContent": ApiRoute("gemini", "embed", _keys("model content taskType title outputDimensionality")),
    "batchEmbedContents": ApiRoute("gemini", "embed", _keys("requests")),
}
_MODEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")

# Tools that run at the provider, which clients offer without being asked: left out of the request, and told.
_LEFT_OUT: Final[Mapping[Shape, re.Pattern[str]]] = {
    "openai": re.compile(r"web_search(?:_preview)?(?:_[0-9_]{10})?|file_search|code_interpreter|image_generation"),
    "anthropic": re.compile(r"(?:web_search|web_fetch|code_execution)_[0-9]{8}"),
}
_GEMINI_LEFT_OUT: Final = _keys(
    "googleSearch google_search googleSearchRetrieval google_search_retrieval codeExecution code_execution urlContext"
    " url_context"
)
# Where a request says that a tool is to be used, and the words for that of any tool.
_CHOICES: Final = ("tool_choice", "toolConfig", "tool_config")
_INSISTING: Final = _keys("required any ANY tool function custom")
# Tools that run where the agent is, and parts whose content is in the request itself.
_OPENAI_TOOLS: Final = ("function", "custom", "local_shell", "apply_patch")
_ANTHROPIC_TOOLS: Final = re.compile(r"custom|(?:bash|text_editor|computer|memory)_[0-9]{8}")
_OPENAI_PARTS: Final = _keys(
    "text image_url input_audio refusal file input_text input_image input_file output_text summary_text reasoning_text"
)
_OPENAI_ITEMS: Final = _keys(
    "message function_call function_call_output custom_tool_call custom_tool_call_output reasoning local_shell_call"
    " local_shell_call_output apply_patch_call apply_patch_call_output"
)
_ANTHROPIC_BLOCKS: Final = _keys("text image document tool_use tool_result thinking redacted_thinking search_result")
_ANTHROPIC_SOURCES: Final = _keys("base64 text content")
_GEMINI_PARTS: Final = _keys(
    "text inlineData inline_data functionCall function_call functionResponse function_response thought"
    " thoughtSignature thought_signature videoMetadata"
)
_DEPTH: Final = 8
_KIND: Final = re.compile(r"[a-z0-9_.-]{1,64}")


class RefusedError(Exception):
    """A request that is not passed on: the HTTP status, the code of the denial, and the reason in words."""

    def __init__(self, status: int, code: str, message: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_seconds = status, code, message, retry_seconds


class ModelCall(Struct):
    """One request, read: ``path`` begins with a slash, ``body`` is its document without the tools ``left_out``."""

    route: ApiRoute
    path: str
    model: str
    stream: bool
    body: Body
    left_out: tuple[str, ...] = ()


def route(method: str, path: str, *, anthropic: bool) -> tuple[ApiRoute, str]:
    """Return the operation of a request, and the model that its path names.

    ``anthropic`` says whether the request has Anthropic's version header: two APIs list models at one path.

    Raises:
        RefusedError: there is no such operation.
    """
    if (method, path) == ("GET", "/v1/models") and anthropic:
        return ApiRoute("anthropic", "list"), ""
    found = _ROUTES.get((method, path))
    if found is not None:
        return found, ""
    match = _GEMINI_PATH.fullmatch(path)
    if match is not None and method == "POST":
        return _GEMINI_VERBS[match[2]], match[1]
    known = {known_path for _, known_path in _ROUTES}
    if path in known or match is not None:
        raise RefusedError(405, "path_refused", f"{method} is not answered here")
    raise RefusedError(404, "path_refused", "the gate answers for models alone, and knows no such path")


def read(found: ApiRoute, path: str, named: str, raw: bytes) -> ModelCall:
    """Read the body of a request and judge it.

    Raises:
        RefusedError: it is no document of this operation, or asks the provider for more than an answer.
    """
    if found.operation in ("list", "version"):
        if raw:
            raise RefusedError(400, "malformed", "this request has no body")
        return ModelCall(found, path, "", stream=False, body={})
    body = _document(raw)
    if odd := sorted(set(body) - found.keys):
        raise RefusedError(400, "field_refused", f"the field `{odd[0]}` is not passed on")
    model = named or body.get("model")
    if type(model) is not str or not _MODEL.fullmatch(model):
        raise RefusedError(400, "malformed", "`model` is no name of a model")
    if named and body.get("model", f"models/{named}") not in (named, f"models/{named}"):
        raise RefusedError(400, "malformed", "path and body name two models")
    stream = body.get("stream", found.shape == "ollama" and found.operation == "generate")
    if type(stream) is not bool:
        raise RefusedError(400, "malformed", "`stream` is neither true nor false")
    left_out = _leave_out(found.shape, body)
    for fault in _faults(found, named, body):
        raise RefusedError(400, "content_refused", fault)
    return ModelCall(found, path, model, stream or path.endswith(":streamGenerateContent"), body, left_out)


def _document(raw: bytes) -> Body:
    try:
        # UTF-8 alone (RFC 8259, 8.1). json would guess another encoding, and a sealed gate cannot load its codec.
        found = json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise RefusedError(400, "malformed", "the body is no JSON document, or has a key twice") from e
    if type(found) is not dict:
        raise RefusedError(400, "malformed", "the body is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> Body:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Of two keys the gate would judge one, and the provider might take the other.
        raise ValueError("a key twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _leave_out(shape: Shape, body: Body) -> tuple[str, ...]:
    """Take the tools that run at the provider out of a body, and return their kinds.

    Raises:
        RefusedError: the request insists on one of them, or its list is of another form.
    """
    tools = [*_dicts(body.get("tools"), texts=False)]
    kept, left_out = _without_gemini(tools) if shape == "gemini" else _without(_LEFT_OUT.get(shape), tools)
    if not left_out:
        return ()
    insisting = left_out if kept else left_out | _INSISTING
    said = json.dumps([body.get(key) for key in _CHOICES])
    kinds = sorted(left_out)
    if any(f'"{word}"' in said for word in insisting):
        raise RefusedError(400, "content_refused", f"the tool `{kinds[0]}` runs at the provider")
    if kept:
        body["tools"] = kept
    else:
        for key in ("tools", *_CHOICES):
            body.pop(key, None)
    return tuple(kinds)


def _without(at_provider: re.Pattern[str] | None, tools: Sequence[Body]) -> tuple[list[Body], frozenset[str]]:
    kinds = [str(tool.get("type")) for tool in tools]
    gone = [at_provider is not None and bool(at_provider.fullmatch(kind)) for kind in kinds]
    kept = [tool for tool, out in zip(tools, gone, strict=True) if not out]
    return kept, frozenset(kind for kind, out in zip(kinds, gone, strict=True) if out)


def _without_gemini(tools: Sequence[Body]) -> tuple[list[Body], frozenset[str]]:
    kept = [{key: value for key, value in tool.items() if key not in _GEMINI_LEFT_OUT} for tool in tools]
    return [tool for tool in kept if tool], _GEMINI_LEFT_OUT & {key for tool in tools for key in tool}


def _faults(found: ApiRoute, named: str, body: Body) -> Iterator[str]:
    """The parts of a body that ask for more than an answer."""
    if found.shape == "openai":
        yield from _openai(body)
    elif found.shape == "anthropic":
        yield from _anthropic(body)
    elif found.shape == "gemini":
        yield from _gemini(body, named)
    elif found.shape == "ollama":
        for tool in _dicts(body.get("tools"), texts=False):
            if tool.get("type", "function") != "function":
                yield "this tool runs at the provider"


def _dicts(value: Any, *, texts: bool = True) -> Iterator[Body]:
    """Yield the objects of a list. ``texts`` may be in its place, or in it; anything else is refused unread.

    Raises:
        RefusedError: it is of another form, which a provider might read in a way of its own.
    """
    if value is None or (texts and isinstance(value, str)):
        return
    if not isinstance(value, list):
        raise RefusedError(400, "malformed", "a list of the request is none")
    for one in value:
        if isinstance(one, dict):
            yield one
        elif not texts or not isinstance(one, str | int):
            raise RefusedError(400, "malformed", "a list of the request has an item of another form")


def _named(tool: Body) -> str:
    kind = tool.get("type")
    return f"the tool `{kind}`" if isinstance(kind, str) and _KIND.fullmatch(kind) else "this tool"


def _openai(body: Body) -> Iterator[str]:
    tools = [*_dicts(body.get("tools"), texts=False)]
    # A namespace is a group of tools, and no tool.
    inner = [one for tool in tools if tool.get("type") == "namespace" for one in _dicts(tool.get("tools"), texts=False)]
    for tool in (*(one for one in tools if one.get("type") != "namespace"), *inner):
        if tool.get("type") not in _OPENAI_TOOLS:
            yield f"{_named(tool)} runs at the provider: only `function` and tools of the client are passed on"
    for message in _dicts(body.get("messages"), texts=False):
        yield from _openai_parts(message.get("content"))
    for item in _dicts(body.get("input")):
        if item.get("type", "message") not in _OPENAI_ITEMS:
            yield "this item is kept or made at the provider"
        yield from _openai_parts(item.get("content"))
        if isinstance(item.get("output"), list):
            yield from _openai_parts(item["output"])


def _openai_parts(content: Any) -> Iterator[str]:
    for part in _dicts(content):
        kind, image = part.get("type"), part.get("image_url")
        if kind not in _OPENAI_PARTS:
            yield "this type of content is not passed on"
        address = image.get("url") if isinstance(image, dict) else image
        if image is not None and not (isinstance(address, str) and address.startswith("data:")):
            yield "the provider would fetch this image: send it as a data: URL"
        file = part.get("file")
        if {"file_id", "file_url"} & {*part, *(file if isinstance(file, dict) else ())}:
            yield "the provider would fetch this file: send its content as file_data"


def _anthropic(body: Body) -> Iterator[str]:
    for tool in _dicts(body.get("tools"), texts=False):
        kind = tool.get("type", "custom")
        if type(kind) is not str or not _ANTHROPIC_TOOLS.fullmatch(kind):
            yield f"{_named(tool)} runs at the provider: only tools of the client are passed on"
    for message in _dicts(body.get("messages"), texts=False):
        yield from _blocks(message.get("content"), 0)
    yield from _blocks(body.get("system"), 0)


def _blocks(content: Any, depth: int) -> Iterator[str]:
    if depth > _DEPTH:
        yield "the content is nested too deeply"
        return
    for block in _dicts(content):
        source = block.get("source")
        if block.get("type") not in _ANTHROPIC_BLOCKS:
            yield "this type of content is not passed on"
        if isinstance(source, dict):
            if source.get("type") not in _ANTHROPIC_SOURCES:
                yield "the provider would fetch this content: send it in the request"
            yield from _blocks(source.get("content"), depth + 1)
        yield from _blocks(block.get("content"), depth + 1)


def _gemini(body: Body, named: str) -> Iterator[str]:
    for tool in _dicts(body.get("tools"), texts=False):
        if set(tool) - {"functionDeclarations", "function_declarations"}:
            yield "this tool runs at the provider: only function declarations are passed on"
    contents: list[Body] = []
    for name in ("systemInstruction", "system_instruction", "content", "contents"):
        found = body.get(name)
        contents += [found] if isinstance(found, dict) else [*_dicts(found, texts=False)]
    for one in _dicts(body.get("requests")):
        if one.get("model", f"models/{named}") != f"models/{named}" or set(one) - _GEMINI_VERBS["embedContent"].keys:
            yield "path and body name two models, or the request has another field"
        contents += [one["content"]] if isinstance(one.get("content"), dict) else []
    for content in contents:
        parts = content.get("parts")
        for part in [parts] if isinstance(parts, dict) else _dicts(parts, texts=False):
            if set(part) - _GEMINI_PARTS:
                yield "the provider would fetch this content: send it as inlineData"


def encoded(body: Body) -> bytes:
    """The body as it is sent on.

    Raises:
        RefusedError: it has no such form, as text with half a character.
    """
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as e:
        raise RefusedError(400, "malformed", "the body cannot be written down") from e


# --- the size of an answer ------------------------------------------------------------------------------------------


def output_limit(call: ModelCall) -> int | None:
    """The bound that the request sets on its answer, in tokens; None without one."""
    holder = _limit_holder(call)
    values = [holder[name] for name in call.route.limits if type(holder.get(name)) is int and holder[name] > 0]
    return min(values, default=None) if values else None


def bound_output(call: ModelCall, most: int) -> None:
    """Bound the answer by ``most`` tokens, where the request asks for more or says nothing.

    Raises:
        RefusedError: it asks for several answers.
    """
    several = [name for name in ("n", "best_of") if call.body.get(name) not in (None, 1)]
    config = _limit_holder(call)
    if several or config.get("candidateCount", config.get("candidate_count", 1)) != 1:
        raise RefusedError(400, "field_refused", "with max_output_tokens a request has one answer")
    if not call.route.limits:
        return
    written = [name for name in call.route.limits if name in config]
    for name in written:
        value = config[name]
        if type(value) is not int or value < 1 or value > most:
            config[name] = most
    if not written:
        config[call.route.limits[0] if call.path != "/v1/chat/completions" else "max_tokens"] = most
    thinking = call.body.get("thinking")
    if isinstance(thinking, dict) and type(thinking.get("budget_tokens")) is int and thinking["budget_tokens"] >= most:
        del call.body["thinking"]


def _limit_holder(call: ModelCall) -> Body:
    """The part of the body that has the keys of ``ApiRoute.limits``."""
    if call.route.shape not in ("gemini", "ollama"):
        return call.body
    name = "options" if call.route.shape == "ollama" else "generationConfig"
    if call.route.shape == "gemini" and "generation_config" in call.body:
        call.body[name] = call.body.pop("generation_config")
    holder = call.body.setdefault(name, {}) if call.route.operation == "generate" else {}
    if type(holder) is not dict:
        raise RefusedError(400, "malformed", f"`{name}` is no object")
    if "max_output_tokens" in holder:
        holder["maxOutputTokens"] = holder.pop("max_output_tokens")
    return holder


def with_usage(call: ModelCall) -> bool:
    """Have a stream end with its counts. Returns whether the request did not ask for them itself."""
    if call.route.shape != "openai" or not call.stream or call.path == "/v1/responses":
        return False
    options = call.body.setdefault("stream_options", {})
    if type(options) is not dict:
        raise RefusedError(400, "malformed", "`stream_options` is no object")
    if options.get("include_usage") is True:
        return False
    options["include_usage"] = True
    return True


# --- answers --------------------------------------------------------------------------------------------------------


def refusal(shape: Shape, status: int, code: str, message: str) -> bytes:
    """An error in the provider's own form."""
    document: Any = {"error": {"message": message, "type": _openai_type(status), "param": None, "code": code}}
    if shape == "anthropic":
        document = {"type": "error", "error": {"type": _anthropic_type(status), "message": message}}
    elif shape == "gemini":
        document = {"error": {"code": status, "message": message, "status": _gemini_status(status)}}
    elif shape == "ollama":
        document = {"error": message}
    return json.dumps(document).encode()


def _openai_type(status: int) -> str:
    names = {404: "invalid_request_error", 429: "rate_limit_exceeded"}
    return names.get(status, "invalid_request_error" if status < 500 else "server_error")


def _anthropic_type(status: int) -> str:
    names = {403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    return names.get(status, "invalid_request_error" if status < 500 else "api_error")


def _gemini_status(status: int) -> str:
    names = {403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
    return names.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")


def listing(shape: Shape, names: Sequence[str]) -> bytes:
    """A list of models in the provider's own form."""
    if shape == "ollama":
        return json.dumps({"models": [{"name": name, "model": name} for name in names]}).encode()
    if shape == "gemini":
        return json.dumps({"models": [{"name": f"models/{name}", "displayName": name} for name in names]}).encode()
    if shape == "anthropic":
        when = "1970-01-01T00:00:00Z"
        data = [{"type": "model", "id": name, "display_name": name, "created_at": when} for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return json.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last}).encode()
    rows = [{"id": name, "object": "model", "created": 0, "owned_by": "covenant"} for name in names]
    return json.dumps({"object": "list", "data": rows}).encode()

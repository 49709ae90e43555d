# mypy: ignore-errors
# The SDK is installed by the test alone.
"""A server of the official SDK with all that the server scenarios of the MCP conformance suite ask of one.

``mcp_suite_server.py stdio`` speaks over stdin and stdout, ``mcp_suite_server.py PORT`` over HTTP on the loopback. The
SDK is in ``site`` beside it. It runs by itself, in a sandbox or bare: it imports nothing of this project.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site"))

import asyncio
import json
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
NONE: dict[str, Any] = {"type": "object", "properties": {}}
STRING = {"type": "string"}


def given(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {**STRING, **more}}, "required": [name]}


DIALECT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": {"$anchor": "addressDef", "type": "object", "properties": {"street": STRING, "city": STRING}}},
    "properties": {
        "name": STRING,
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": STRING,
        "email": STRING,
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
TITLED = [{"const": f"value{n}", "title": f"Choice {n}"} for n in (1, 2, 3)]
OPTIONS = ["option1", "option2", "option3"]
ENUMS: dict[str, Any] = {
    "untitledSingle": {"type": "string", "enum": OPTIONS},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["One", "Two", "Three"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": OPTIONS}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}
DEFAULTS: dict[str, Any] = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
ASKED = {"username": STRING, "email": STRING}
# What a tool returns at once.
ANSWERS: dict[str, list[dict[str, Any]]] = {
    "test_simple_text": [{"type": "text", "text": "This is a simple text response for testing."}],
    "test_image_content": [{"type": "image", "data": PNG, "mimeType": "image/png"}],
    "test_audio_content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}],
    "test_embedded_resource": [
        {
            "type": "resource",
            "resource": {"uri": "test://embedded-resource", "mimeType": "text/plain", "text": "It is."},
        }
    ],
    "test_multiple_content_types": [
        {"type": "text", "text": "Multiple content types test:"},
        {"type": "image", "data": PNG, "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "test://mixed", "mimeType": "application/json", "text": "{}"}},
    ],
    "test_logging_tool": [{"type": "text", "text": "It has nothing to log."}],
    "json_schema_2020_12_tool": [{"type": "text", "text": "It has a schema."}],
    "test_x_mcp_header": [{"type": "text", "text": "It has a header."}],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(ANSWERS, NONE),
    **{f"test_{name}": NONE for name in ("tool_with_logging", "tool_with_progress", "error_handling")},
    "test_missing_capability": NONE,
    "test_streaming_elicitation": NONE,
    "test_sampling": given("prompt"),
    "test_elicitation": given("message"),
    "test_elicitation_sep1034_defaults": NONE,
    "test_elicitation_sep1330_enums": NONE,
    "test_input_required_result_elicitation": NONE,
    "json_schema_2020_12_tool": DIALECT,
    "test_x_mcp_header": given("region", **{"x-mcp-header": "Region"}),
}


async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
    tools = [types.Tool(name=name, description=f"For {name}", input_schema=one) for name, one in SCHEMAS.items()]
    return types.ListToolsResult(tools=tools, ttl_ms=0, cache_scope="public")


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> Any:
    name, arguments = params.name, params.arguments or {}
    if name in ANSWERS:
        return types.CallToolResult.model_validate({"content": ANSWERS[name]})
    if name == "test_error_handling":
        return told("This tool intentionally returns an error for testing", is_error=True)
    if name == "test_tool_with_logging":
        for said in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.session.send_log_message("info", said)
            await asyncio.sleep(0.05)
        return told("It logged.")
    if name == "test_tool_with_progress":
        for done in (0, 50, 100):
            await ctx.session.report_progress(done, 100)
            await asyncio.sleep(0.05)
        return told("It is done.")
    if name in ("test_input_required_result_elicitation", "test_streaming_elicitation"):
        return input_result(params)
    if name == "test_missing_capability":
        needed = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(code=-32021, message="it needs sampling", data=needed)
    if name == "test_sampling":
        message = {"role": "user", "content": {"type": "text", "text": arguments["prompt"]}}
        said = await ctx.session.create_message([types.SamplingMessage.model_validate(message)], max_tokens=100)
        return told(f"LLM response: {said.content.text}")
    wanted = {
        "test_elicitation": (ASKED, list(ASKED)),
        "test_elicitation_sep1034_defaults": (DEFAULTS, []),
        "test_elicitation_sep1330_enums": (ENUMS, []),
    }
    if name not in wanted:
        raise MCPError(code=types.INVALID_PARAMS, message=f"no tool {name}")
    properties, required = wanted[name]
    schema = {"type": "object", "properties": properties, "required": required}
    answer = await ctx.session.elicit_form(arguments.get("message", "Say it"), schema)
    return told(f"Elicitation completed: action={answer.action}, content={json.dumps(answer.content)}")


def input_result(params: types.CallToolRequestParams) -> Any:
    """Ask for input in the way of revision 2026-07-28: the result is what is asked, and the call comes again."""
    if (params.input_responses or {}).get("user_name") is not None:
        return told("Hello!")
    schema = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}
    asked = {"method": "elicitation/create", "params": {"message": "What is your name?", "requestedSchema": schema}}
    return types.InputRequiredResult.model_validate({"inputRequests": {"user_name": asked}})


def told(text: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)


RESOURCES: dict[str, dict[str, Any]] = {
    "test://static-text": {"mimeType": "text/plain", "text": "This is the content of the static text resource."},
    "test://static-binary": {"mimeType": "image/png", "blob": PNG},
    "test://watched-resource": {"mimeType": "text/plain", "text": "Watched."},
    "test://template/123/data": {
        "mimeType": "application/json",
        "text": json.dumps({"id": "123", "templateTest": True, "data": "Data for ID: 123"}),
    },
}
TEXT = {"type": "text"}
PROMPTS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "test_simple_prompt": ([], [{**TEXT, "text": "This is a simple prompt for testing."}]),
    "test_prompt_with_arguments": (
        ["arg1", "arg2"],
        [{**TEXT, "text": "Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"}],
    ),
    "test_prompt_with_embedded_resource": (
        ["resourceUri"],
        [
            {"type": "resource", "resource": {"uri": "{resourceUri}", "mimeType": "text/plain", "text": "Embedded."}},
            {**TEXT, "text": "Please process the embedded resource above."},
        ],
    ),
    "test_prompt_with_image": (
        [],
        [{"type": "image", "data": PNG, "mimeType": "image/png"}, {**TEXT, "text": "Please analyze the image above."}],
    ),
}


async def list_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
    found = [types.Resource(uri=uri, name=uri, mime_type=one["mimeType"]) for uri, one in RESOURCES.items()]
    return types.ListResourcesResult(resources=found[:3], ttl_ms=0, cache_scope="public")


async def list_templates(ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
    one = types.ResourceTemplate(uri_template="test://template/{id}/data", name="template")
    return types.ListResourceTemplatesResult(resource_templates=[one], ttl_ms=0, cache_scope="public")


async def read_resource(ctx: Any, params: Any) -> types.ReadResourceResult:
    uri = str(params.uri)
    if uri not in RESOURCES:
        raise MCPError(code=types.INVALID_PARAMS, message="Resource not found", data={"uri": uri})
    contents = [{"uri": uri, **RESOURCES[uri]}]
    return types.ReadResourceResult.model_validate({"contents": contents, "ttlMs": 0, "cacheScope": "public"})


async def nothing(ctx: Any, params: Any) -> types.EmptyResult:
    return types.EmptyResult()


def argument(name: str) -> types.PromptArgument:
    return types.PromptArgument(name=name, description=name, required=True)


async def list_prompts(ctx: Any, params: Any) -> types.ListPromptsResult:
    found = [
        types.Prompt(name=name, description=name, arguments=[argument(one) for one in arguments])
        for name, (arguments, _) in PROMPTS.items()
    ]
    return types.ListPromptsResult(prompts=found, ttl_ms=0, cache_scope="public")


async def get_prompt(ctx: Any, params: Any) -> types.GetPromptResult:
    raw = json.dumps(PROMPTS[params.name][1])
    for name, value in (params.arguments or {}).items():
        raw = raw.replace("{" + name + "}", json.dumps(value)[1:-1])
    messages = [{"role": "user", "content": one} for one in json.loads(raw)]
    return types.GetPromptResult.model_validate({"messages": messages})


async def complete(ctx: Any, params: Any) -> types.CompleteResult:
    return types.CompleteResult(completion=types.Completion(values=["paris", "park"], total=2, has_more=False))


server: Server[Any] = Server(
    "suite",
    version="1.0",
    on_list_tools=list_tools,
    on_call_tool=call_tool,
    on_list_resources=list_resources,
    on_list_resource_templates=list_templates,
    on_read_resource=read_resource,
    on_subscribe_resource=nothing,
    on_unsubscribe_resource=nothing,
    on_list_prompts=list_prompts,
    on_get_prompt=get_prompt,
    on_completion=complete,
    on_set_logging_level=nothing,
)


async def over_stdio() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        asyncio.run(over_stdio())
    else:
        import uvicorn

        uvicorn.run(server.streamable_http_app(), host="localhost", port=int(sys.argv[1]), log_level="error")

"""The program that speaks to a server of the transport http: lines of stdin become requests, replies lines of stdout.

It runs in a sandbox that reaches the server's host alone. A header that is a secret is added at the gate of that
sandbox (``inject``), so that the program never has it. A gate adds one header to a request: where several are secrets,
the program reads the others from the files of its sandbox. Without a gate it trusts the operator's authorities too.
"""

from __future__ import annotations

import json
from typing import Final

from policy.manifest.tools import secret_scan
from policy.manifest.tools.document import Server

NAME: Final = "relay.py"
# Authorities that the operator trusts beside the system's (`[tls] ca`), for a connection that no gate speaks TLS for.
AUTHORITIES: Final = "authorities.pem"
# Requests of MCP over streamable HTTP: one POST for each message, answered by JSON or by a stream of events.
_CODE: Final = """\
import base64, concurrent.futures, contextlib, http.client, json, os, re, ssl, sys, threading

HOST, PORT, PATH, HEADERS, SECRETS, AUTHORITIES = json.loads(GIVEN)
for name, secret in SECRETS.items():
    with open(os.path.join(os.environ["CREDENTIALS_DIRECTORY"], secret), encoding="latin-1", newline="") as stream:
        HEADERS[name] = stream.read().removesuffix("\\n")
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", HEADERS[name]):
        sys.exit(f"covenant: secret {secret} is no value of a header")
MOST = 4 << 20
VERSION = "io.modelcontextprotocol/protocolVersion"
context, session, lines = ssl.create_default_context(), {}, threading.Lock()
if AUTHORITIES:
    context.load_verify_locations(os.path.join(os.path.dirname(os.path.abspath(__file__)), AUTHORITIES))
mirrors = {}


def mirrored(schema, path=()):
    found = schema.get("properties") if isinstance(schema, dict) else None
    for name, one in found.items() if isinstance(found, dict) else ():
        if isinstance(one, dict) and isinstance(one.get("x-mcp-header"), str):
            yield "Mcp-Param-" + one["x-mcp-header"], path + (name,)
        yield from mirrored(one, path + (name,))


def encoded(value):
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text.isascii() and text.isprintable() and text == text.strip() and not text.startswith("=?base64?"):
        return text
    return "=?base64?" + base64.b64encode(text.encode("utf-8", "replace")).decode() + "?="


def repeated(message):
    # Revision 2026-07-28: headers repeat what the message says. Before it they are those of the session.
    given = message.get("params") or {}
    version = (given.get("_meta") or {}).get(VERSION)
    if version is None:
        return session
    found = {"MCP-Protocol-Version": version, "Mcp-Method": message["method"]}
    if message["method"] == "tools/call":
        found["Mcp-Name"] = encoded(given["name"])
        for header, path in mirrors.get(given["name"], ()):
            value = given.get("arguments")
            for part in path:
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[header] = encoded(value)
    return found


def learn(message, said):
    result = said.get("result") if isinstance(said, dict) else None
    for tool in (result or {}).get("tools", ()) if message.get("method") == "tools/list" else ():
        mirrors[tool["name"]] = list(mirrored(tool.get("inputSchema")))


def say(text):
    with lines:
        sys.stdout.write(text + "\\n")
        sys.stdout.flush()


def events(reply):
    data, size = [], 0
    while line := reply.readline(MOST):
        size += len(line)
        if size > MOST:
            raise ValueError("it sends too much")
        line = line.rstrip(b"\\r\\n")
        if line.startswith(b"data:"):
            data.append(line[5:].lstrip())
        elif not line and data:
            yield b"\\n".join(data)
            data, size = [], 0


def ask(message):
    number, said = message.get("id") if "method" in message else None, None
    own = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    line = http.client.HTTPSConnection(HOST, PORT, timeout=600, context=context)
    try:
        line.request("POST", PATH, json.dumps(message), {**HEADERS, **own, **repeated(message)})
        reply = line.getresponse()
        kind = reply.headers.get_content_type()
        refused = None
        if 400 <= reply.status < 500 and kind == "application/json":
            body = reply.read(MOST)
            with contextlib.suppress(ValueError):
                refused = json.loads(body)
        if isinstance(refused, dict) and isinstance(refused.get("error"), dict) and number is not None:
            say(json.dumps({"jsonrpc": "2.0", "id": number, "error": refused["error"]}))
            return
        if reply.status in (404, 405):
            raise ValueError(f"status {reply.status}: it takes no POST of streamable HTTP; SSE alone is not spoken")
        if not 200 <= reply.status < 300:
            raise ValueError(f"status {reply.status}")
        if found := reply.headers.get("Mcp-Session-Id"):
            session["Mcp-Session-Id"] = found
        answered = number is None
        if kind == "text/event-stream" and number is not None:
            for event in events(reply):
                said = json.loads(event)
                learn(message, said)
                say(json.dumps(said))
                if isinstance(said, dict) and "method" not in said and said.get("id") == number:
                    answered = True
                    break
        elif number is not None:
            body = reply.read(MOST + 1)
            if len(body) > MOST:
                raise ValueError("it sends too much")
            said = json.loads(body)
            answered = isinstance(said, dict) and said.get("id") == number
            if answered:
                learn(message, said)
                say(json.dumps(said))
        if message.get("method") == "initialize" and isinstance(said, dict):
            about = said.get("result")
            session["MCP-Protocol-Version"] = str(about.get("protocolVersion", ""))[:32] if about else ""
        if not answered:
            raise ValueError("it ended without an answer")
    except Exception as error:  # what the server wrote ends no other call
        print(f"covenant: {error}", file=sys.stderr, flush=True)
        if number is not None:
            text = f"the server cannot be asked: {error}"
            say(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": -32603, "message": text}}))
    finally:
        line.close()


with concurrent.futures.ThreadPoolExecutor(16) as pool:
    for text in sys.stdin:
        message = json.loads(text)
        if message.get("method") == "tools/call":
            pool.submit(ask, message)
        else:
            ask(message)
"""


def address(server: Server) -> tuple[str, int, str]:
    """Return host, port and path of a server's endpoint."""
    rest = (server.endpoint or "").removeprefix("https://")
    authority, _, path = rest.partition("/")
    host, _, port = authority.partition(":")
    return host, int(port or 443), f"/{path}"


def secrets(server: Server) -> dict[str, str]:
    """Return the headers of a server that are secrets, each with the name of its secret."""
    found = ((name, secret_scan.referenced(value)) for name, value in server.headers.items())
    return {name: secret for name, secret in found if secret is not None}


def read_secrets(server: Server) -> dict[str, str]:
    """Return the headers that the program reads from files, each with the name of its secret."""
    return dict(list(secrets(server).items())[1:])


def files(server: Server, authorities: bytes) -> dict[str, bytes]:
    """Return the files of the relay: the program, which has the headers that are literals, and ``authorities`` as PEM.

    A server with a secret has none: the gate that adds the secret verifies its certificate.
    """
    hidden = secrets(server)
    literals = {name: value for name, value in server.headers.items() if name not in hidden}
    beside = {AUTHORITIES: authorities} if authorities and not hidden else {}
    given = [*address(server), literals, read_secrets(server), *(beside or [""])]
    return {NAME: _CODE.replace("GIVEN", json.dumps(json.dumps(given))).encode(), **beside}

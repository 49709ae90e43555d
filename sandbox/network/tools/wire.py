"""Messages between the processes that serve a run's tools.

service gate -> tool gate   a REQUEST, the alias that the path names, the headers of MCP as JSON, one message of MCP
                            (SOCK_STREAM)
tool gate -> service gate   a REPLY, one message of MCP
broker -> tool gate         as the service gate but without headers, on a line of its own, and the same back
tool gate -> supervisor     a row of the log (SOCK_SEQPACKET); ACK for each that must be durable before a call
tool gate -> supervisor     the alias of a server that is to start (SOCK_SEQPACKET)
supervisor -> tool gate     the alias with descriptors: the server's stdin and stdout, and a pipe to its shim that says
                            whether calls are under way; none where it is refused
tool gate -> supervisor     SPAWN, the name of an agent and its text as JSON (SOCK_STREAM), where children are granted;
                            without bytes: its client no longer waits, and the child is stopped
supervisor -> tool gate     SPAWN, the outcome as JSON: `ok` with run, text and sources, or `error`
tool gate -> supervisor     a call that is held for an operator, or that its client is gone: JSON (SOCK_SEQPACKET)
supervisor -> tool gate     a VERDICT on it
"""

from __future__ import annotations

import struct
from typing import Final

# Number of the request, kind, and bytes of the alias, of the headers and of the message.
REQUEST: Final = struct.Struct("!IBBHI")
MESSAGE, CANCEL = 0, 1
# Number of the request, what is said of it, bytes of the message.
REPLY: Final = struct.Struct("!IBI")
# A reply, no reply because the message was a notification, a refusal (no message of MCP, or one that its revision does
# not allow), no server of that alias, and a reply that there is no such method in the revision of the message.
ANSWER, NOTHING, MALFORMED, UNKNOWN, NO_METHOD = range(5)
# Number of the request, and bytes of its JSON: at most so many of a request (six for each of a text), of an outcome.
SPAWN: Final = struct.Struct("!II")
SPAWN_BYTES: Final = 4 << 20
OUTCOME_BYTES: Final = 64 << 20
# The most bytes of a message of a client, those of a reply, and those of a row.
MESSAGE_BYTES: Final = 4 << 20
# A reply has at most a line of a server or the result of a child, of 4 MiB each, and the id of its request, of 1 MiB
# over the broker: JSON in ASCII has six bytes for a character of two.
REPLY_BYTES: Final = 32 << 20
# A row names a tool as its client does: 512 characters, each of up to twelve bytes of JSON.
ROW_BYTES: Final = 8192
ALIAS_BYTES: Final = 128
HEADER_BYTES: Final = 60_000
ACK: Final = b"+"
# The row whose event must be durable before the gate acts.
AWAITED: Final = "tool_called"
# Number of the request, and whether its call may be made.
VERDICT: Final = struct.Struct("!I?")
# Numbers of both lines are below this one, which the tool gate adds to those of the broker.
BROKERS: Final = 1 << 31
LAST_NUMBER: Final = (1 << 32) - 1
# Calls of one run that are held at one time, and the bytes of a question.
HELD_CALLS: Final = 64
QUESTION_BYTES: Final = 8192

"""The errors of A2A: which one an error of ours is, and its document in JSON-RPC and in HTTP+JSON.

Numbers, statuses and reasons are those of the specification, section 5.4 (version 1.0) and section 8 (version 0.3).
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from policy import errors

JSON: Final = "application/json"
_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
_DOMAIN: Final = "a2a-protocol.org"


class Fault(NamedTuple):
    """An error of A2A: its JSON-RPC number, HTTP status, gRPC status and reason."""

    number: int
    status: int
    grpc: str
    reason: str


PARSE: Final = Fault(-32700, 400, "INVALID_ARGUMENT", "JSON_PARSE_ERROR")
INVALID_REQUEST: Final = Fault(-32600, 400, "INVALID_ARGUMENT", "INVALID_REQUEST")
NO_METHOD: Final = Fault(-32601, 404, "NOT_FOUND", "METHOD_NOT_FOUND")
INVALID_PARAMS: Final = Fault(-32602, 400, "INVALID_ARGUMENT", "INVALID_PARAMS")
INTERNAL: Final = Fault(-32603, 500, "INTERNAL", "INTERNAL_ERROR")
NO_TASK: Final = Fault(-32001, 404, "NOT_FOUND", "TASK_NOT_FOUND")
NOT_CANCELABLE: Final = Fault(-32002, 400, "FAILED_PRECONDITION", "TASK_NOT_CANCELABLE")
NO_PUSH: Final = Fault(-32003, 400, "FAILED_PRECONDITION", "PUSH_NOTIFICATION_NOT_SUPPORTED")
UNSUPPORTED: Final = Fault(-32004, 400, "FAILED_PRECONDITION", "UNSUPPORTED_OPERATION")
CONTENT_TYPE: Final = Fault(-32005, 400, "INVALID_ARGUMENT", "CONTENT_TYPE_NOT_SUPPORTED")
NO_EXTENDED_CARD: Final = Fault(-32007, 400, "FAILED_PRECONDITION", "EXTENDED_AGENT_CARD_NOT_CONFIGURED")
NO_VERSION: Final = Fault(-32009, 400, "FAILED_PRECONDITION", "VERSION_NOT_SUPPORTED")
# A2A leaves these to HTTP; the numbers of JSON-RPC are those that it leaves to servers.
UNAUTHENTICATED: Final = Fault(-32000, 401, "UNAUTHENTICATED", "UNAUTHENTICATED")
FORBIDDEN: Final = Fault(-32000, 403, "PERMISSION_DENIED", "PERMISSION_DENIED")
NO_AGENT: Final = Fault(-32000, 404, "NOT_FOUND", "AGENT_NOT_FOUND")
BUSY: Final = Fault(-32000, 429, "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED")
UNAVAILABLE: Final = Fault(-32000, 503, "UNAVAILABLE", "UNAVAILABLE")
# Of these HTTP says the status also in JSON-RPC, whose other errors have the status 200.
_OF_HTTP: Final = frozenset({401, 403, 429, 503})
_BY_STATUS: Final = {401: UNAUTHENTICATED, 403: FORBIDDEN, 404: NO_METHOD, 429: BUSY, 500: INTERNAL, 503: UNAVAILABLE}
_BY_CODE: Final = {
    errors.CapabilityMissingError.code: FORBIDDEN,
    errors.CapabilityScopeError.code: FORBIDDEN,
    errors.RecipientRejectedError.code: FORBIDDEN,
    errors.SenderMismatchError.code: FORBIDDEN,
    errors.AuthenticationError.code: UNAUTHENTICATED,
    errors.NoAgentError.code: NO_AGENT,
    errors.NoTaskError.code: NO_TASK,
    errors.TaskStateError.code: NOT_CANCELABLE,
    errors.TaskExistsError.code: INVALID_PARAMS,
    errors.TaskInvalidError.code: INVALID_PARAMS,
    errors.MalformedRequestError.code: INVALID_PARAMS,
    errors.MailboxFullError.code: BUSY,
    errors.BusyError.code: BUSY,
    errors.UnsupportedError.code: UNSUPPORTED,
}


def refused(fault: Fault, message: str, *, hint: str = "") -> errors.HttpRefusedError:
    """Return the error that is answered as this fault."""
    return errors.HttpRefusedError(message, hint=hint, status=fault.status, fault=fault)


def fault_of(error: errors.CovenantError) -> Fault:
    """Return the fault that an error is."""
    found, status = error.details.get("fault"), error.details.get("status")
    if isinstance(found, Fault):
        return found
    if isinstance(status, int):
        return _of_status(status)
    return _BY_CODE.get(error.code, INTERNAL)


def at_status(status: int, error: errors.CovenantError) -> Fault:
    """Return the fault of an error for which the HTTP server chose the status."""
    found = fault_of(error)
    return found if found.status == status else _of_status(status)


def _of_status(status: int) -> Fault:
    return _BY_STATUS.get(status, INVALID_REQUEST)._replace(status=status)


def rpc_status(fault: Fault) -> int:
    """Return the HTTP status of a fault in JSON-RPC."""
    return fault.status if fault.status in _OF_HTTP or fault.reason == NO_AGENT.reason else 200


def to_rpc(number: str | int | None, fault: Fault, error: errors.CovenantError) -> bytes:
    """Return a reply of JSON-RPC that is this error."""
    body = {"code": fault.number, "message": error.message, "data": [_info(fault, error)]}
    return _bytes({"jsonrpc": "2.0", "id": number, "error": body})


def to_http(fault: Fault, error: errors.CovenantError, *, legacy: bool) -> bytes:
    """Return the error's document of HTTP+JSON (google.rpc.Status). Clients of version 0.3 look for the name of an
    error beside it."""
    body = {"code": fault.status, "status": fault.grpc, "message": error.message, "details": [_info(fault, error)]}
    name = fault.reason.removesuffix("_ERROR").title().replace("_", "") + "Error"
    return _bytes({"error": body, **({"type": name, "message": error.message} if legacy else {})})


def _info(fault: Fault, error: errors.CovenantError) -> dict[str, Any]:
    more = {"covenantCode": error.code, **({"hint": error.hint} if error.hint else {})}
    return {"@type": _INFO, "reason": fault.reason, "domain": _DOMAIN, "metadata": more}


def _bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()

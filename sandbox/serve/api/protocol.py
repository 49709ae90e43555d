"""Requests to the supervisor: one closed model for each kind, read strictly from one frame.

The first frame of a connection is its only request. Any byte that the client sends after it, or its end of file, means
that the client leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

import pydantic

from policy import base58, errors, json_bounds
from policy.signing import approval, lease, strict_json
from policy.signing.statement import AGENT_ID_PATTERN
from sandbox import unix_wire

# A year, as `covenant run --timeout` takes it.
_MAX_TIMEOUT_MS = 365 * 86_400_000


class ServiceRequest(pydantic.BaseModel):
    """One request. The descriptors that came with it are counted by ``descriptors``: how many there must be."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: str

    @property
    def descriptors(self) -> int:
        """How many descriptors come with it."""
        return 0


class OnBehalfOf(pydantic.BaseModel):
    """The identity that a client asks for: a display name and a public key. The supervisor decides nothing by it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    pubkey_b58: Annotated[str, pydantic.Field(max_length=64)]
    display: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_.-]{1,256}@[A-Za-z0-9_.-]{1,256}$")]

    @pydantic.field_validator("pubkey_b58")
    @classmethod
    def _is_a_key(cls, value: str) -> str:
        try:
            base58.decode(value, length=32)
        except ValueError:
            raise ValueError("is no public key in base58") from None
        return value


WorkspaceRun = Annotated[str, pydantic.Field(min_length=1, max_length=36)]


def _check_workspace(asked: RunRequest | SessionRequest) -> None:
    if not asked.workspace and (asked.resume is not None or asked.keep_workspace):
        raise ValueError("only a workspace is resumed or kept")


_DaemonTool = Annotated[str, pydantic.Field(min_length=1, max_length=128)]


class RunRequest(ServiceRequest):
    """Run the signed package in the directory that comes as a descriptor, with the intent ``text``.

    ``user`` is for trusted-local and root alone. A run ends when the client leaves, unless ``detach``.
    ``intent_id`` is the client's own name for the intent, by which ``ps`` shows the run as well; it decides nothing.
    ``manifest_sha256`` is the manifest that the client has seen and decided by: a package with another is refused.
    ``on_behalf_of`` says for whom they ask, which the agent and the log are told and which decides nothing either.
    ``credits`` is what the run may spend at its service gate.
    With ``daemon_tools`` a socket comes behind the first directory, on which the client answers as an MCP server. They
    are those of its tools that the run may have, if its manifest grants them too (sandbox.lifecycle.tool_terms).
    With ``rows`` one frame comes before the last: what the log says of the run and of all that descended from it
    (sandbox.audit.run_report), however the run went. With ``stderr`` the agent's first lines there come as they are
    written, each time as a state `stderr` with its ``text``; an instance of standby tells them with its answer alone.
    So do the first requests that wait for an operator, as states `asked` with their ``request``, ``asks``, ``target``
    and ``seconds``.
    With ``workspace`` a second directory comes, which becomes the agent's workspace; ``resume`` begins the id of an
    earlier run with whose changes it goes on, and ``keep_workspace`` lets it stay when nothing is changed in it. With
    ``repository`` a third one comes: the common directory of git, where that is a linked worktree.
    """

    kind: Literal["run"]
    text: str
    timeout_ms: Annotated[int, pydantic.Field(ge=1, le=_MAX_TIMEOUT_MS)] | None = None
    user: Annotated[str, pydantic.Field(min_length=1, max_length=64)] | None = None
    detach: bool = False
    intent_id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")] | None = None
    priority: Literal["low", "normal", "high"] = "normal"
    manifest_sha256: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    on_behalf_of: OnBehalfOf | None = None
    rows: bool = False
    stderr: bool = False
    workspace: bool = False
    repository: bool = False
    resume: WorkspaceRun | None = None
    keep_workspace: bool = False
    credits: Annotated[int, pydantic.Field(ge=0, le=2**63 - 1)] | None = None
    daemon_tools: Annotated[tuple[_DaemonTool, ...], pydantic.Field(strict=False, max_length=64)] | None = None

    @pydantic.field_validator("text")
    @classmethod
    def _is_unicode(cls, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("is not valid Unicode") from None
        return value

    @property
    def descriptors(self) -> int:
        """The package's directory, the daemon's line, the workspace's directory, and that of its repository."""
        return 1 + (self.daemon_tools is not None) + self.workspace + self.repository

    @pydantic.model_validator(mode="after")
    def _has_workspace(self) -> RunRequest:
        _check_workspace(self)
        return self


class TerminalSize(pydantic.BaseModel):
    """The size of the caller's terminal."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    rows: Annotated[int, pydantic.Field(ge=0, le=65_535)]
    columns: Annotated[int, pydantic.Field(ge=0, le=65_535)]


class SessionRequest(ServiceRequest):
    """Open a session with the signed package in the directory that comes as a descriptor (contract stdio or terminal).

    Three pipes follow the directory: for stdin, for stdout, and for stderr; with ``terminal`` the third brings new
    sizes (run_io.RESIZE), and with ``recording`` a fourth takes an asciicast. The session ends when the client leaves.

    A session with a terminal goes on if the client sends run_io.DETACH before it leaves, or asked with ``keep``.
    Without ``attached`` it begins without a client's pipes (``AttachRequest``). With ``workspace`` a directory comes
    last, which becomes the agent's workspace, and with ``repository`` one more; these, ``resume`` and
    ``keep_workspace`` are as of ``RunRequest``.
    """

    kind: Literal["session"]
    timeout_ms: Annotated[int, pydantic.Field(ge=1, le=_MAX_TIMEOUT_MS)] | None = None
    terminal: TerminalSize | None = None
    recording: bool = False
    keep: bool = False
    attached: bool = True
    workspace: bool = False
    repository: bool = False
    resume: WorkspaceRun | None = None
    keep_workspace: bool = False

    @pydantic.model_validator(mode="after")
    def _fits(self) -> SessionRequest:
        _check_workspace(self)
        if self.terminal is None and (self.recording or self.keep or not self.attached):
            raise ValueError("only a terminal is recorded, or goes on without a client")
        if self.recording and (self.keep or not self.attached):
            raise ValueError("a recording ends with its client, so that the session cannot go on")
        return self

    @property
    def descriptors(self) -> int:
        """The package's directory, three pipes, one more for a recording, and the workspace's directory."""
        return (4 + self.recording if self.attached else 1) + self.workspace + self.repository


class AttachRequest(ServiceRequest):
    """Attach to the terminal of the run whose id begins so. Three pipes come: for stdin, for stdout, and for new sizes.

    The answer comes when the run ends. The client detaches when it closes its end of the first pipe.
    """

    kind: Literal["attach"]
    run: Annotated[str, pydantic.Field(min_length=1, max_length=36)]
    terminal: TerminalSize

    @property
    def descriptors(self) -> int:
        """Return 3, the pipes."""
        return 3


class CheckPackage(ServiceRequest):
    """Would the supervisor take this package, signed as it is, for an operator's? Nothing of it is run, and no row is
    written. ``manifest_sha256`` as of ``RunRequest``."""

    kind: Literal["check_package"]
    manifest_sha256: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @property
    def descriptors(self) -> int:
        """The package's directory."""
        return 1


RunId = Annotated[str, pydantic.Field(min_length=1, max_length=36)]


class Ps(ServiceRequest):
    """The live runs."""

    kind: Literal["ps"]


class Top(ServiceRequest):
    """The live runs and what each uses."""

    kind: Literal["top"]


class Operate(ServiceRequest):
    """Suspend, resume or end the run whose id begins so, with ``tree`` everything below it as well.

    With ``grace_ms`` the agent of a single run is asked to end (SIGTERM), and has so long until it is killed.
    """

    kind: Literal["operate"]
    operation: Literal["suspend", "resume", "kill"]
    run: RunId
    tree: bool = False
    grace_ms: Annotated[int, pydantic.Field(ge=0, le=60_000)] | None = None
    reason: Annotated[str, pydantic.Field(max_length=1000)] = ""


class Logs(ServiceRequest):
    """The stderr of a run from ``offset`` on, or the stdout of a run that failed.

    ``agent`` instead of ``run`` is the newest ended run of that agent.
    """

    kind: Literal["logs"]
    run: RunId | None = None
    agent: Annotated[str, pydantic.Field(pattern=AGENT_ID_PATTERN)] | None = None
    offset: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    stream: Literal["stderr", "stdout"] = "stderr"

    @pydantic.model_validator(mode="after")
    def _one(self) -> Self:
        if (self.run is None) is (self.agent is None):
            raise ValueError("it names either a run or an agent")
        return self


class Wait(ServiceRequest):
    """The run's end, however long it takes."""

    kind: Literal["wait"]
    run: RunId


WorkspacePath = Annotated[str, pydantic.Field(min_length=1, max_length=4096)]
# Of approvals: an envelope of policy.signing.approval, as text.
_APPROVAL_CHARACTERS: Final = approval.MAX_BYTES


class WorkspaceRequest(ServiceRequest):
    """Ask about the workspaces of the caller's runs, root of all (sandbox.workspace.requests).

    ``verb`` is one of its verbs; each takes ``run``, the beginning of an id, but for ``list``, and some of the rest.
    """

    kind: Literal["workspace"]
    verb: Literal["list", "diff", "texts", "show", "apply", "branch", "fork", "discard"]
    run: RunId | None = None
    paths: Annotated[tuple[WorkspacePath, ...], pydantic.Field(strict=False, max_length=900)] | None = None
    path: WorkspacePath | None = None
    offset: Annotated[int, pydantic.Field(ge=0, lt=2**63)] | None = None
    exact: bool | None = None
    name: Annotated[str, pydantic.Field(min_length=1, max_length=1024)] | None = None
    digest: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    approval: Annotated[str, pydantic.Field(max_length=_APPROVAL_CHARACTERS)] | None = None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> WorkspaceRequest:
        required, optional = _WORKSPACE_FIELDS[self.verb]
        given = set(self.fields)
        if not required <= given <= required | optional:
            raise ValueError(f"`{self.verb}` takes {', '.join(sorted(required | optional)) or 'no field'}")
        return self

    @property
    def fields(self) -> dict[str, object]:
        """Return the fields that the verb takes."""
        return {name: value for name, value in self if name not in ("kind", "verb") and value is not None}


_LEASE_CHARACTERS: Final = lease.MAX_BYTES


class ApprovalsRequest(ServiceRequest):
    """Ask about what runs are held for: ``list``, ``grant`` by a signed lease, ``deny`` (sandbox.control.approvals)."""

    kind: Literal["approvals"]
    verb: Literal["list", "grant", "deny"]
    request: Annotated[str, pydantic.Field(min_length=1, max_length=64)] | None = None
    lease: Annotated[str, pydantic.Field(min_length=1, max_length=_LEASE_CHARACTERS)] | None = None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> ApprovalsRequest:
        needs = {"list": set[str](), "grant": {"request", "lease"}, "deny": {"request"}}[self.verb]
        if set(self.fields) != needs:
            raise ValueError(f"`{self.verb}` takes {', '.join(sorted(needs)) or 'no field'}")
        return self

    @property
    def fields(self) -> dict[str, str]:
        """Return the fields that the verb takes."""
        given = {"request": self.request, "lease": self.lease}
        return {name: value for name, value in given.items() if value is not None}


# Of each verb, the fields that it needs, and those that it may have.
_WORKSPACE_FIELDS: Final[Mapping[str, tuple[set[str], set[str]]]] = {
    "list": (set(), set()),
    "diff": ({"run"}, {"paths", "exact"}),
    "texts": ({"run", "paths"}, set()),
    "show": ({"run", "path"}, {"offset"}),
    "apply": ({"run"}, {"paths", "exact", "digest", "approval"}),
    "branch": ({"run", "name"}, {"digest", "approval"}),
    "fork": ({"run"}, set()),
    "discard": ({"run"}, set()),
}

KINDS: Final[Mapping[str, type[ServiceRequest]]] = {
    "ps": Ps,
    "top": Top,
    "operate": Operate,
    "logs": Logs,
    "wait": Wait,
    "run": RunRequest,
    "session": SessionRequest,
    "attach": AttachRequest,
    "check_package": CheckPackage,
    "workspace": WorkspaceRequest,
    "approvals": ApprovalsRequest,
}


def parse(raw: bytes) -> ServiceRequest:
    """The request in the body of a frame.

    Raises:
        errors.RequestError: it is none.
    """
    try:
        value = strict_json.loads(raw, max_bytes=unix_wire.REQUEST_BYTES, max_values=json_bounds.REQUEST_VALUES)
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise strict_json.MalformedJsonError("no object with a `kind`")
        model = KINDS.get(value["kind"])
        if model is None:
            raise strict_json.MalformedJsonError(f"of unknown kind `{strict_json.shown(value['kind'])}`")
        return strict_json.validate(model, value)
    except strict_json.MalformedJsonError as e:
        raise errors.RequestError(f"the request is refused: {e}") from e

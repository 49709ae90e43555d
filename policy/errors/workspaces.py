"""Errors of workspaces: the caller's directory behind an overlay, and its changes."""

from __future__ import annotations

from policy.errors.base import Actor
from policy.errors.operator import OperatorError


class WorkspaceError(OperatorError):
    """A directory cannot be a workspace, or there is no workspace of that name. The directory was not changed."""

    code = "workspace"


class WorkspaceBusyError(WorkspaceError):
    """Another process is using the workspace or its directory."""

    code = "workspace_busy"
    actor = Actor.MACHINE


class VolumeError(OperatorError):
    """There is no volume of that name, it is damaged, or the host has no room for it. No volume was changed."""

    code = "volume"


class VolumeBusyError(VolumeError):
    """A run or command is using the volume."""

    code = "volume_busy"
    actor = Actor.MACHINE


class PathInUseError(OperatorError):
    """Another live run writes the same path. Only one may, unless the manifests of both say `shared`."""

    code = "path_in_use"
    actor = Actor.MACHINE


class WorkspaceConflictError(WorkspaceError):
    """The host changed files of the directory since the session began. Nothing was applied; each file is named."""

    code = "workspace_conflict"


class WorkspaceDigestError(WorkspaceError):
    """The changes of the workspace are not those whose digest was given. Nothing was applied."""

    code = "workspace_digest"


class WorkspaceApprovalError(WorkspaceError):
    """The manifest requires an operator's approval of exactly these changes, and there is none. Nothing was applied."""

    code = "workspace_approval"


class WorkspaceLimitError(WorkspaceError):
    """The caller keeps the maximum of workspaces, or of data in them, that the configuration allows."""

    code = "workspace_limit"

"""Errors of the supervisor's socket, and of its clients there."""

from __future__ import annotations

from policy.errors.base import Actor
from policy.errors.machine import MachineError
from policy.errors.operator import OperatorError


class CallerError(OperatorError):
    """This user may not ask the supervisor: callers are root and the uids of `callers` in its configuration."""

    code = "not_a_caller"


class BusyError(OperatorError):
    """This user has the maximum of open requests, or sends requests too often."""

    code = "too_many_requests"


class RequestError(OperatorError):
    """The request is unknown to the supervisor, too large, or incomplete at the deadline."""

    code = "bad_request"


class ServiceError(MachineError):
    """The supervisor disconnected before its answer, or the listener is no supervisor."""

    code = "supervisor_silent"


class HangingError(MachineError):
    """A file system that the request needs does not answer: the process that waited for it was killed."""

    code = "file_system_hangs"


class ImpostorError(MachineError):
    """The process at the supervisor's socket is not root, so the client sends nothing."""

    code = "supervisor_untrusted"


class AlreadyServedError(MachineError):
    """Another supervisor serves this state already."""

    code = "already_served"
    actor = Actor.OPERATOR

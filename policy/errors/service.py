"""Errors of the supervisor's socket, and of its clients there."""

from __future__ import annotations

from policy.errors.base import Actor
from policy.errors.machine import MachineError
from policy.errors.operator import OperatorError


class CallerError(OperatorError):
    """This user may not ask the supervisor: callers are root and the uids of `callers` in its configuration."""

    code = "not_a_caller"


class BusyError(OperatorError):
    """This user has as many requests open as one may have, or asks too often."""

    code = "too_many_requests"


class RequestError(OperatorError):
    """The request is none that the supervisor knows, is too large, or did not come whole in time."""

    code = "bad_request"


class ServiceError(MachineError):
    """The supervisor ended the conversation before its answer, or does not speak as one."""

    code = "supervisor_silent"


class HangingError(MachineError):
    """A file system that the request needs does not answer: the process that waited for it was killed."""

    code = "file_system_hangs"


class ImpostorError(MachineError):
    """The process at the supervisor's socket is not root: nothing is sent there."""

    code = "supervisor_untrusted"


class AlreadyServedError(MachineError):
    """Another supervisor serves this state already."""

    code = "already_served"
    actor = Actor.OPERATOR

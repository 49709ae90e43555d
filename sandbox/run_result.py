"""The result of a run, and its form in the messages of the supervisor. Light: a client imports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from policy import contract, denials, errors


class RunResult(Struct, frozen=True):
    """Result of a started run: exactly one of ``error`` and ``result`` is None. Times in seconds.

    ``interrupted``: a signal to end this process arrived when the answer was already there. It belongs to the process,
    so a message does not have it. ``exit_status`` is the agent's, 128 + n for a signal; a stream session has no other
    answer, and an empty ``result``.
    """

    run_id: str
    intent_id: str
    agent_id: str
    policy_digest: str | None
    result: contract.AgentResult | None
    error: errors.CovenantError | None
    stderr: str
    not_enforced: tuple[str, ...] = ()
    unknown_sections: tuple[str, ...] = ()
    denials: tuple[denials.Row, ...] = ()
    timings: Mapping[str, float] = msgspec.field(default_factory=dict)
    usage: contract.Usage = contract.NOTHING_USED
    interrupted: bool = False
    exit_status: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values. A denial is [layer, target, code, count]."""
        return {
            "run_id": self.run_id,
            "intent_id": self.intent_id,
            "agent_id": self.agent_id,
            "policy_digest": self.policy_digest,
            "result": None if self.result is None else structs.asdict(self.result),
            "error": None if self.error is None else self.error.to_json(),
            "stderr": self.stderr,
            "not_enforced": list(self.not_enforced),
            "unknown_sections": list(self.unknown_sections),
            "denials": [[r.denial.layer, r.denial.target, r.denial.code, r.count] for r in self.denials],
            "timings": dict(self.timings),
            "usage": dataclasses.asdict(self.usage),
            "exit_status": self.exit_status,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunResult:
        """Return the result in a message. Other members of the message are ignored.

        Raises:
            errors.ServiceError: the message has no result of a run.
        """
        try:
            result, error = document["result"], document["error"]
            return cls(
                run_id=document["run_id"],
                intent_id=document["intent_id"],
                agent_id=document["agent_id"],
                policy_digest=document["policy_digest"],
                result=None if result is None else _agent_result(result),
                error=None if error is None else errors.restored(error),
                stderr=document["stderr"],
                not_enforced=tuple(document["not_enforced"]),
                unknown_sections=tuple(document["unknown_sections"]),
                denials=tuple(denials.Row(denials.Denial(*row[:3]), row[3]) for row in document["denials"]),
                timings=document["timings"],
                usage=contract.Usage(**document["usage"]),
                exit_status=document["exit_status"],
            )
        except (KeyError, TypeError, IndexError) as e:
            raise errors.ServiceError("the supervisor's answer is none of a run") from e


def _agent_result(document: Mapping[str, Any]) -> contract.AgentResult:
    lists = {name: tuple(document[name]) for name in ("sources", "files", "runtime_events")}
    return contract.AgentResult(text=document["text"], **lists)

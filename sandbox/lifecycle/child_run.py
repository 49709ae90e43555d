"""Run a child in its own process: from the request of its parent's shim to the outcome that it reports.

The fork brings the parent's identity and the child's grants, from the memory of the parent's shim. The package is found
and read here, by its agent id. The log and the state are the installation's, opened anew.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from policy import contract, errors
from policy.audit_log import events
from policy.package import Package
from sandbox.broker import delegation, package_lookup
from sandbox.broker.children import ChildRequest, Say
from sandbox.lifecycle.context import RunContext
from sandbox.lifecycle.run import Request, Run, RunDependencies
from sandbox.run_io import CallerStreams
from sandbox.run_result import RunResult


def run_child(dependencies: RunDependencies, parent: Request, child_request: ChildRequest, say: Say) -> None:
    """Run one child. Every outcome is reported to the parent and written to the log.

    ``dependencies`` are opened in this process; ``parent`` is the request by which its parent runs.
    """
    issuer = child_request.lineage.issuer
    try:
        found = package_lookup.find(
            child_request.agent_id, dependencies.config.agents, parent.children, rights=parent.rights
        )
    except (errors.CovenantError, OSError) as e:
        error = e if isinstance(e, errors.CovenantError) else errors.PackageError(f"it cannot be read: {e.strerror}")
        fields = events.rejection(error, agent_id=child_request.agent_id, run_id=child_request.run_id)
        dependencies.ledger.append("manifest_rejected", fields, issuer=issuer, now_ms=_now_ms())
        say(refusal(error))
        return
    command = child_request.command
    request = Request(
        package=found.package,
        text=child_request.text,
        issuer=issuer,
        timeout_ms=child_request.timeout_ms,
        package_name=found.name,
        children=parent.children,
        rights=parent.rights,
        behalf=parent.behalf,
        uid=parent.uid,
        credits=parent.credits,
        meter=parent.meter,
        arguments=() if command is None else command.argv,
        caller=None if command is None else CallerStreams(command.stdin, command.stdout, command.stderr),
        # The key that its parent's intent names.
        told={**issuer, "pubkey": parent.reads["pubkey"]},
    )
    with contextlib.ExitStack() as stack:
        try:
            child = delegation.ChildContext(child_request, say, stack)
            one = Run(RunContext(dependencies, request, now_ms=_now_ms(), child=child))
        except errors.CovenantError as e:
            _rejected(dependencies, child_request, found.package, issuer, e)
            say(refusal(e))
            return
        # Hold signals until the parent has the outcome: a signal after the end would report it as killed, with no
        # usage.
        with one.signals:
            try:
                outcome = _outcome(one.go(), is_command=command is not None)
            except BaseException as e:
                outcome = refusal(e if isinstance(e, errors.CovenantError) else errors.StoppedError("it was stopped"))
                if not isinstance(e, errors.CovenantError):
                    raise
            finally:
                stack.close()
                if one.used_ms:
                    say({"used": one.used_ms})
                say(outcome)


def refusal(error: errors.CovenantError) -> dict[str, Any]:
    """Return a refusal for the parent's agent.

    ``domains`` of rule 4 are the requested, the possible and the removed ones, if the error has them.
    """
    more = {name: error.details[name] for name in ("domains",) if name in error.details}
    hint = {"hint": error.hint} if error.hint else {}
    return {"error": {"code": error.code, "message": error.message, **hint, **more}}


def _outcome(answer: RunResult, *, is_command: bool) -> dict[str, Any]:
    """Return the outcome for the parent's agent. It lacks the stderr, which is only for the operator.

    A command that exited has an exit status, also one that is not 0.
    """
    exited = answer.error is None or isinstance(answer.error, errors.AgentFailedError)
    if is_command and exited and answer.exit_status is not None:
        return {"ok": {"run": answer.run_id, "status": answer.exit_status}}
    if answer.result is None:
        assert answer.error is not None
        return refusal(answer.error)
    result: contract.AgentResult = answer.result
    return {"ok": {"run": answer.run_id, "text": result.text, "sources": list(result.sources)}}


def _rejected(
    dependencies: RunDependencies,
    child_request: ChildRequest,
    package: Package,
    issuer: dict[str, str],
    error: errors.CovenantError,
) -> None:
    fields = events.rejection(
        error, agent_id=child_request.agent_id, run_id=child_request.run_id, package_digest=package.digest
    )
    dependencies.ledger.append("manifest_rejected", fields, issuer=issuer, now_ms=_now_ms())


def _now_ms() -> int:
    return int(time.time() * 1000)

"""Notes on denials of the service gate: the line to add to a section of ``services``, or the operator's part.

The target is the gate's own sentence (sandbox.network.service), in which the agent chose the quoted name.
"""

from __future__ import annotations

import re
from typing import Final

from policy.denials import Denial
from policy.grants.services import ServiceSet
from policy.manifest import text

# A name alone and no pattern, which would grant more than the agent asked for.
_MODEL: Final = re.compile(r"the model `(?P<name>[A-Za-z0-9._:/@+-]+)` is not granted\Z")
_AGENT: Final = re.compile(r"the agent `(?P<name>[A-Za-z0-9_.-]+)` is not granted\Z")
_PAGES: Final = re.compile(r"pages of (?P<name>[a-z0-9_.-]+) are not granted\Z")
_SIGNAL: Final = re.compile(r"the signal (?P<name>[a-z]+) is not granted\Z")
_REDIRECT: Final = "the page redirects to a host that is not granted"
_OPERATORS: Final = frozenset({"provider_failed", "no_provider", "key_refused"})


def note(denial: Denial, granted: ServiceSet) -> str:
    """Return what to add or to try; empty for a request that no line allows."""
    if denial.code == "model_not_granted" and (found := _MODEL.search(denial.target)):
        providers = sorted({provider for provider, _ in granted.models})
        whose = f"provider {text.toml(providers[0])}" if len(providers) == 1 else "its provider"
        return f"add to models of {whose} in allow of [services.models]: {text.toml(found['name'])}"
    if denial.code == "search_not_granted":
        return 'add to [services.search]: allow = ["PROVIDER"]; covenant models list shows them'
    if denial.code == "host_not_granted" and (found := _PAGES.search(denial.target)):
        return f"add to hosts of [services.fetch]: {text.toml(found['name'])}"
    if denial.code == "host_not_granted" and denial.target.endswith(_REDIRECT):
        return "add to hosts of [services.fetch]: the host to which the page redirects"
    if denial.code == "agent_not_granted" and (found := _AGENT.search(denial.target)):
        return f"add to allow of [services.agents]: {text.toml(found['name'])}"
    if denial.code == "signal_not_granted" and (found := _SIGNAL.search(denial.target)):
        return f"add to signals of [services.telemetry]: {text.toml(found['name'])}"
    if denial.code in _OPERATORS and "collector" in denial.target:
        return "it is the operator's part: agents in [export] of config.toml names the collector"
    if denial.code in _OPERATORS and "provider" in denial.target:
        return "it is the operator's part: covenant models test NAME says whether a provider answers"
    return ""

"""Notes on denials of the service gate: the line to add to a section of ``services``, or the operator's part.

The target ends in the gate's own sentence (policy.grants.services.SENTENCES), in which the agent chose the name.
"""

from __future__ import annotations

import re
from typing import Final

from policy.denials import Denial
from policy.grants.services import SENTENCES, ServiceSet
from policy.manifest import text

# A name alone and no pattern, which would grant more than the agent asked for; and the list that it is added to.
_NAMES: Final = {
    "model_not_granted": (r"[A-Za-z0-9._:/@+-]+", "models of {whose} in allow of [services.models]"),
    "host_not_granted": (r"[a-z0-9_.-]+", "hosts of [services.fetch]"),
    "agent_not_granted": (r"[A-Za-z0-9_.-]+", "allow of [services.agents]"),
    "signal_not_granted": (r"[a-z]+", "signals of [services.telemetry]"),
}
_REDIRECT: Final = "the page redirects to a host that is not granted"
_OPERATORS: Final = frozenset({"provider_failed", "no_provider", "key_refused"})


def note(denial: Denial, granted: ServiceSet) -> str:
    """Return what to add or to try; empty for a request that no line allows."""
    if name := _name(denial):
        providers = sorted({provider for provider, _ in granted.models})
        whose = f"provider {text.toml(providers[0])}" if len(providers) == 1 else "its provider"
        return f"add to {_NAMES[denial.code][1].format(whose=whose)}: {text.toml(name)}"
    if denial.code == "search_not_granted":
        return 'add to [services.search]: allow = ["PROVIDER"]; covenant models list shows them'
    if denial.code == "host_not_granted" and denial.target.endswith(_REDIRECT):
        return "add to hosts of [services.fetch]: the host to which the page redirects"
    if denial.code in _OPERATORS and "collector" in denial.target:
        return "it is the operator's part: agents in [export] of config.toml names the collector"
    if denial.code in _OPERATORS and "provider" in denial.target:
        return "it is the operator's part: covenant models test NAME says whether a provider answers"
    return ""


def _name(denial: Denial) -> str:
    """Return the name in the gate's sentence; empty when the target does not end in it."""
    if denial.code not in _NAMES:
        return ""
    before, after = SENTENCES[denial.code].split("{}")
    found = re.search(f"{re.escape(before)}({_NAMES[denial.code][0]}){re.escape(after)}\\Z", denial.target)
    return found[1] if found else ""

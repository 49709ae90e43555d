"""What is said on a terminal of a verb that has worked for more than a second, where no part of it has better words.

A test holds the table against the tree of commands: a new verb has its words here, or the reason why it has none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from sandbox import progress

# The verb, or the group of it; the longer one holds.
WORDS = {
    "keys": "sealing and opening keys",
    "trust": "changing the trust root",
    "trust import": "checking the trust root and those of before it",
    "trust show": "reading the trust root",
    "trust revoke": "revoking, and ending what runs by it",
    "manifest": "reading the package",
    "manifest sign": "reading and signing the package",
    "manifest verify": "reading the package and checking its signatures",
    "policy": "compiling the policy",
    "policy diff": "comparing two policies",
    "policy prove": "proving it of all that the policy allows",
    "policy why": "asking the compiled policy",
    "run": "the agent is at work",
    "dev": "the agent is at work",
    "ps": "looking at the runs",
    "suspend": "suspending",
    "resume": "resuming",
    "kill": "ending",
    "logs": "reading what the agent wrote",
    "wait": "waiting for the end of the run",
    "metrics": "counting what the log has",
    "attest": "reading the log",
    "denials": "reading the log",
    "vault": "opening the vault",
    "vault grant-log": "reading the log",
    "bench": "preparing to measure",
    "doctor": "checking this host",
    "ping": "asking the daemon",
    "bootstrap": "asking the daemon",
    "intent": "asking the daemon",
    "intents": "asking the daemon",
    "agents": "asking the daemon",
    "memory": "asking the daemon",
    "ignore": "asking the daemon",
    "capabilities": "asking the daemon",
    "peers": "asking the daemon",
    "tools": "asking the daemon",
    "a2a": "asking the daemon",
    "receipts": "asking the daemon",
    "settlement": "asking the daemon",
    "chain": "asking the daemon",
    "budget": "asking the daemon",
    "verify": "holding the daemon's stores against each other",
    "audit": "reading the log",
    "audit cosign": "checking that the log only grew",
    "version": "asking the daemon",
}
SILENT = {
    "top": "it has the screen",
    "daemon": "it becomes the daemon, whose log says what it does",
    "completion": "a shell reads it",
    "help": "it prints a table of ours",
}
# Whoever asks for a document, a page, or to be shown what comes, looks at that.
_SILENT_OPTIONS = ("--json", "--help", "-h", "--watch", "--follow", "--stream")


def words(arguments: Sequence[str]) -> str | None:
    """What a command of these arguments is doing; None where nothing shall be said of it."""
    if set(arguments) & set(_SILENT_OPTIONS):
        return None
    verb = arguments[:1]
    return WORDS.get(" ".join(arguments[:2])) or (WORDS.get(verb[0]) if verb else None)


def shown() -> contextlib.AbstractContextManager[None]:
    """Say so of the command of this process, on its stderr."""
    what = words(sys.argv[1:])
    return contextlib.nullcontext() if what is None else progress.shown(2, what)

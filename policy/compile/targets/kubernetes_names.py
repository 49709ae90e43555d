"""From any string of a manifest to what Kubernetes takes as a name, a label, or a literal in a command line.

INVARIANT: no string of a manifest reaches a Kubernetes object except through this module or as a host name that
``policy.grants.sets.hostnames`` has checked; JSON quotes the rest (tests/property/policy/test_kubernetes_names.py).
"""

from __future__ import annotations

import hashlib
import re

LABEL_CHARACTERS = 63  # RFC 1123, section 2.1, as Kubernetes restricts it: lower case, not longer than a DNS label
_SUFFIX = 16
_NOT_LABEL = re.compile(r"[^a-z0-9]+")


def label(text: str, *also: str) -> str:
    """A DNS-1123 label for ``text``: what can be read of it, and 16 hex digits of the SHA-256 over it and ``also``.

    Two strings never have the same label by accident of spelling, however little of them can be kept. Legal as the
    name of any object, as a label's value and as the name of a unit of systemd.
    """
    spelled = "\0".join((text, *also)).encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(spelled).hexdigest()[:_SUFFIX]
    readable = _NOT_LABEL.sub("-", text.lower()).strip("-")
    # The name of a Service or a user may not begin with a digit, so none of ours does.
    named = readable if readable[:1].isalpha() else f"x-{readable}"
    return f"{named[: LABEL_CHARACTERS - _SUFFIX - 1].strip('-')}-{digest}"


def literal(text: str) -> str:
    """``text`` as an element of ``command``, where ``$(NAME)`` would be replaced and ``$$`` is one ``$``."""
    return text.replace("$", "$$")

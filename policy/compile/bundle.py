"""From the compiled template to the config.json of one run: run id and uid, and nothing else, are filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from policy.compile.artefacts import Artefacts
from policy.compile.oci import TEMPLATE_RUN_ID

_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def instantiate(artefacts: Artefacts, *, run_id: str, uid: int, arguments: Sequence[str] = ()) -> bytes:
    """The config.json that runsc is given. ``arguments`` start another first process than the agent: a self-test's.

    Raises:
        ValueError: ``run_id`` is not a lower-case UUID or ``uid`` is 0.
    """
    if not _RUN_ID.fullmatch(run_id) or uid <= 0:
        raise ValueError("a run needs a UUID and a uid above 0")
    config: dict[str, Any] = json.loads(artefacts.files["config.json"])
    process = config["process"]
    process["user"] = {"uid": uid, "gid": uid}
    process["env"] = [entry.replace(TEMPLATE_RUN_ID, run_id) for entry in process["env"]]
    if arguments:
        process["args"] = list(arguments)
    return json.dumps(config, sort_keys=True).encode()

"""From the compiled template to the config.json of one run: run id, uid and the file of its root are filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from policy import contract, errors
from policy.compile.artefacts import Artefacts
from policy.compile.oci import TEMPLATE_RUN_ID
from policy.manifest.process import INTENT

# gVisor reports a start in one message with all arguments, which a socket takes up to net.core.wmem_default (212,992).
ARGUMENTS_BYTES: Final = 192 * 1024
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def instantiate(
    artefacts: Artefacts,
    *,
    run_id: str,
    uid: int,
    arguments: Sequence[str] = (),
    image: str = "",
) -> bytes:
    """The config.json that runsc is given. ``arguments`` start the agent with its intent or those of a
    call, or another first process: a self-test's. ``image`` is the EROFS file that has the root.

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
    process["terminal"] = process["terminal"] and not arguments
    if image:
        config["annotations"] = root_image(image)
    return json.dumps(config, sort_keys=True).encode()


def root_image(path: str) -> dict[str, str]:
    """Return the annotations by which runsc reads the root from an EROFS file. No other annotation is ever written."""
    return {"dev.gvisor.spec.rootfs.source": path, "dev.gvisor.spec.rootfs.type": "erofs"}


def check_arguments(artefacts: Artefacts, intent: str | None) -> None:
    """Check the size of the arguments before they are made: the intent may be in many places of them.

    Raises:
        errors.UsageError: one argument, or all together, are more than a start takes.
    """
    size, total = len((intent or INTENT).encode()) - len(INTENT), 0
    for one in artefacts.json("config.json")["process"]["args"]:
        length = len(one.encode()) + one.count(INTENT) * size
        total += length
        if length > contract.ARGUMENT_BYTES:
            raise _too_long(f"an argument of the agent is {length} bytes", contract.ARGUMENT_BYTES, intent)
    if total > ARGUMENTS_BYTES:
        raise _too_long(f"the arguments of the agent are {total} bytes", ARGUMENTS_BYTES, intent)


def _too_long(message: str, most: int, intent: str | None) -> errors.UsageError:
    hint = "give the rest on stdin, or in a file of the package"
    if intent is not None:
        hint = "give a shorter text, or take `{intent}` out of [process] args: the agent then reads the text on stdin"
    return errors.UsageError(f"{message}, a start takes {most}", hint=hint, where="process.args")


def with_intent(artefacts: Artefacts, intent: str | None, appended: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arguments with the intent in its place, and those of a call behind them.

    Returns none for an agent that takes neither.
    """
    if intent is None and not appended:
        return ()
    first, *rest = artefacts.json("config.json")["process"]["args"]
    return (first, *(one if intent is None else one.replace(INTENT, intent) for one in rest), *appended)

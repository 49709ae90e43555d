"""Every parser that reads what others wrote."""

from __future__ import annotations

from tests.fuzz import (
    answer_targets,
    artefact_targets,
    broker_targets,
    command_targets,
    dns_targets,
    frame_targets,
    hello_targets,
    live_targets,
    manifest_targets,
    mcp_targets,
    runtime_targets,
    signing_targets,
    tool_targets,
)
from tests.fuzz.drive import Target

ALL: tuple[Target, ...] = (
    *manifest_targets.TARGETS,
    *signing_targets.TARGETS,
    *runtime_targets.TARGETS,
    *answer_targets.TARGETS,
    *artefact_targets.TARGETS,
    *dns_targets.TARGETS,
    *frame_targets.TARGETS,
    *hello_targets.TARGETS,
    *live_targets.TARGETS,
    *tool_targets.TARGETS,
    *mcp_targets.TARGETS,
    *command_targets.TARGETS,
    *broker_targets.TARGETS,
)

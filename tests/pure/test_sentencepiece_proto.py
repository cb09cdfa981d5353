"""Model files that are written read as what was written, by our reader, whatever the length of a piece."""

from __future__ import annotations

import pytest

from edgellm_models.tokenizer.sentencepiece_proto import bpe_specs, read_model, write_model


def test_pieces_of_every_length_come_back() -> None:
    """Lengths at which a number of the format takes one byte more, and characters of several bytes."""
    texts = ["x" * n for n in (1, 116, 117, 118, 119, 120, 126, 127, 128, 129, 16_376, 16_384, 20_000)]
    texts += ["é", "▁日本", "🙂" * 40, "", "\ud800"]
    scores = [-float(i) / 4 for i in range(len(texts))]
    types = [1 + i % 6 for i in range(len(texts))]
    trainer, normalizer = bpe_specs(3, True)
    model = read_model(write_model(texts, scores, types, trainer, normalizer), "it", 100)
    found = [(piece.text, piece.score, piece.type) for piece in model.pieces]
    readable = [text.encode("utf-8", "replace").decode() for text in texts]
    assert found == list(zip(readable, scores, types, strict=True))
    assert model.special_ids["unk"] == 3 and not model.add_dummy_prefix


def test_columns_of_different_lengths_are_refused() -> None:
    trainer, normalizer = bpe_specs(0, False)
    for texts, scores, types in ((["a", "b"], [0.0], [1, 1]), (["a"], [0.0, 1.0], [1, 1])):
        with pytest.raises(ValueError):
            write_model(texts, scores, types, trainer, normalizer)

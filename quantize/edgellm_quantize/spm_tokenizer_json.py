"""A tokenizer.json for a SentencePiece BPE vocabulary: merges found from its scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

SPACE = "\u2581"


def merges_of(
    texts: Sequence[str], scores: Sequence[float], joined: Collection[int]
) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece joins them.

    ``joined`` are the ids of pieces that merging may make. SentencePiece joins the pair whose result has the
    highest score, the leftmost where they are equal.
    """
    ids = {text: index for index, text in enumerate(texts)}
    found = []
    for index in joined:
        text = texts[index]
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in splits if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(-scores[index], pair) for pair in pairs]
    found.sort(key=lambda entry: entry[0])
    return [pair for _, pair in found]


def tokenizer_json(
    texts: Sequence[str],
    scores: Sequence[float],
    kinds: Mapping[int, bool],
    joined: Collection[int],
    *,
    unk_id: int,
    bos_id: int | None,
    byte_fallback: bool,
    space_prefix: bool,
) -> str:
    """The text of a tokenizer.json.

    Args:
        kinds: tokens that are found before a text is cut: id -> whether it is a special one.
        joined: ids of ordinary pieces.
        bos_id: put before every text; None for none.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocabulary = {text: index for index, text in enumerate(texts)}
    model = models.BPE(
        vocabulary,
        merges_of(texts, scores, joined),
        unk_token=texts[unk_id],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    pipeline = Tokenizer(model)
    steps = [normalizers.Prepend(SPACE)] if space_prefix else []
    pipeline.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    tokens = [AddedToken(texts[i], normalized=False, special=kinds[i]) for i in sorted(kinds)]
    pipeline.add_special_tokens([token for token in tokens if token.special])
    pipeline.add_tokens([token for token in tokens if not token.special])
    if bos_id is not None:
        bos = texts[bos_id]
        pipeline.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    text: str = pipeline.to_str()
    return text

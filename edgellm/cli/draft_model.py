"""``--draft MODEL``: the draft model loaded beside the target, checked, and put into its cache and runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm_models.errors import BadInputError, Notice, ResourceError, UsageError

if TYPE_CHECKING:
    from edgellm.cache.kv_storage import KVType
    from edgellm.cache.sequence_blocks import GroupLayout
    from edgellm.config import ResolvedConfig
    from edgellm.runner.draft_model import DraftModel
    from edgellm.speculative.speculator import Speculator
    from edgellm_kernels.batch import KVStorage
    from edgellm_models.network.decoder import Decoder
    from edgellm_models.tokenizer.base import Tokenizer

MATCH = 0.6
"""How often a draft model's token is right, until it is known."""


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model, ready for a runner."""

    name: str
    decoder: Decoder

    def layouts(
        self, groups: Sequence[GroupLayout], context: int, chunk: int, lookahead: int
    ) -> tuple[GroupLayout, ...]:
        """Its layer groups, each with as many blocks as the largest of the target's: a sequence has blocks
        of all or of none. Windows are kept whole, so that what is missing can be run at any time."""
        from edgellm.cache.kv_storage import group_layouts

        own = group_layouts(self.decoder.spec, context, chunk, lookahead=lookahead)
        most = max(group.num_blocks for group in (*groups, *own))
        return tuple(replace(group, window=None, num_blocks=most) for group in own)

    def allocate(
        self, layouts: Sequence[GroupLayout], kv: KVType, device: str, free_bytes: int | None
    ) -> tuple[KVStorage, ...]:
        """The pages of its groups. ResourceError where they do not fit."""
        from edgellm.cache.kv_storage import BLOCK_SIZE, allocate_storage, kv_bytes_per_position

        spec = self.decoder.spec
        needed = sum(
            layout.num_blocks * BLOCK_SIZE * kv_bytes_per_position(spec, len(group.layers), kv)
            for layout, group in zip(layouts, spec.kv_groups, strict=True)
        )
        if free_bytes is not None and needed > free_bytes:
            raise ResourceError(
                f"the KV cache of the draft model {self.name} needs {needed / 1e6:.0f} MB; "
                f"{free_bytes / 1e6:.0f} MB are free; lower --ctx or leave --draft out"
            )
        return allocate_storage(spec, [layout.num_blocks for layout in layouts], kv, device)

    def notice(self, storage: Sequence[KVStorage]) -> Notice:
        kv_bytes = sum(pages.nbytes for pages in storage)
        return Notice(
            "draft_model",
            f"{self.name} drafts: {self.decoder.weight_bytes / 1e6:.0f} MB of weights and "
            f"{kv_bytes / 1e6:.0f} MB of KV cache more",
        )

    def drafter(
        self, storage: Sequence[KVStorage], first_group: int, vocab_size: int, device: str
    ) -> DraftModel:
        from edgellm.runner.choose_program import choose_program
        from edgellm.runner.draft_model import DraftModel

        program = choose_program(self.decoder, storage[first_group:])
        return DraftModel(program, range(first_group, len(storage)), vocab_size, device)


def load_draft(
    resolved: ResolvedConfig,
    tokenizer: Tokenizer,
    target: Decoder,
    kv: KVType,
    speculator: Speculator | None,
    device: str,
) -> LoadedDraft:
    """Opens and checks the draft model, and lets the speculator use it.

    UsageError beside settings that do not draft with it, BadInputError for a model of another vocabulary or a
    cache of int4; NotFoundError and what the readers raise.
    """
    from edgellm.cli.options import models_folder
    from edgellm.speculative.drafter import MAX_DRAFT
    from edgellm_models.catalog import resolve_model
    from edgellm_models.checkpoint import open_checkpoint
    from edgellm_models.network.build import build_decoder
    from edgellm_models.tokenizer import load_tokenizer

    assert resolved.draft is not None
    if resolved.spec != "auto" or speculator is None:
        raise UsageError(
            f"--draft {resolved.draft} goes with --spec auto, not with {resolved.spec}: "
            "leave one of the two out"
        )
    if kv.has_tail:
        raise BadInputError(
            "--draft does not go with int4 KV, whose last rows drafts would displace: use int8"
        )
    found = resolve_model(resolved.draft, models_folder())
    path = found.path
    if path is None:
        raise BadInputError(
            f"the draft model {resolved.draft} is not here yet: `edgellm pull {resolved.draft}` fetches it"
        )
    checkpoint = open_checkpoint(path)
    other = load_tokenizer(path, checkpoint.file_format, checkpoint.metadata)
    check_vocabulary(tokenizer, other, found.name)
    decoder = build_decoder(
        checkpoint, device=device, kernels=resolved.kernels, activations=resolved.activations
    )
    speculator.runner_name, speculator.runner_follows = "draft", True
    share = decoder.weight_bytes / max(1, target.weight_bytes)
    speculator.expect_runner_drafts(MAX_DRAFT, MATCH, share, {})
    return LoadedDraft(found.name, decoder)


def check_vocabulary(tokenizer: Tokenizer, other: Tokenizer, name: str) -> None:
    """BadInputError with the first id that means something else to the draft model."""
    for token_id in range(min(tokenizer.vocab_size, other.vocab_size)):
        ours, theirs = tokenizer.token_text(token_id), other.token_text(token_id)
        if ours != theirs:
            raise BadInputError(
                f"the draft model {name} has another vocabulary: id {token_id} is {theirs!r} there and "
                f"{ours!r} in the model; take a smaller model of the same family"
            )
    if tokenizer.vocab_size != other.vocab_size:
        first = min(tokenizer.vocab_size, other.vocab_size)
        raise BadInputError(
            f"the draft model {name} has another vocabulary: it has {other.vocab_size} ids and the model "
            f"{tokenizer.vocab_size}, so id {first} is missing in one of them; take a smaller model of the "
            "same family"
        )

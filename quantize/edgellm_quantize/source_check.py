"""What of a source's files belongs to its model: looked at before anything of it is rounded or written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm_models.checkpoint.tensor_names import is_canonical
from edgellm_models.errors import BadInputError, Notice
from edgellm_models.metadata_values import shown

if TYPE_CHECKING:
    from edgellm_models.checkpoint.reader import Checkpoint, TensorInfo
    from edgellm_models.network.spec import ModelSpec


@dataclass(frozen=True)
class UsedTensors:
    """The tensors that the model computes with, as the decoder asks for them."""

    names: frozenset[str]
    """Canonical names."""
    notices: tuple[Notice, ...]
    """Of what is left out and the reader has not told of."""


def used_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> UsedTensors:
    """What an output of ``checkpoint`` holds.

    BadInputError names a tensor that is missing or has another shape than the model's sizes ask for: an
    output would keep the fault, and no program could load it.
    """
    from edgellm_models.network.build import LayerLoader

    try:
        used = LayerLoader(checkpoint).used
    except BadInputError as error:
        raise BadInputError(f"{checkpoint.path}: {error}") from None
    notices = []
    left = [
        name for name in checkpoint.tensors() if name not in used and is_canonical(spec.architecture, name)
    ]
    if spec.tied_embeddings and "output.weight" in left:
        left.remove("output.weight")
        detail = "lm_head.weight was left out: config.json says that the embedding is used"
        notices.append(Notice("tied_head_dropped", detail))
    if left:
        files = [checkpoint.tensors()[name].file_name for name in left]
        count, are = ("1 tensor", "is") if len(left) == 1 else (f"{len(left)} tensors", "are")
        what = f"{count} that {spec.architecture} with {_layers(spec)} does not use {are} left out"
        notices.append(Notice("unknown_tensors", f"{checkpoint.path.name}: {what}: {shown(files)}"))
    return UsedTensors(used, tuple(notices))


def _layers(spec: ModelSpec) -> str:
    return "1 layer" if spec.num_layers == 1 else f"{spec.num_layers} layers"


def requantized_notice(tensors: Iterable[TensorInfo]) -> list[Notice]:
    """Rounding what was rounded before loses twice, so it is said."""
    coarse = sorted({info.type_name for info in tensors} - {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
    if not coarse:
        return []
    detail = (
        f"the source is quantized already ({', '.join(coarse)}): what it lost stays lost; take the "
        "original where there is one"
    )
    return [Notice("source_is_quantized", detail)]


def tokenizer_notice(checkpoint: Checkpoint) -> list[Notice]:
    """Said of a model whose tokenizer is not there or is damaged: its weights can be of use without."""
    from edgellm_models.tokenizer import load_tokenizer

    try:
        load_tokenizer(checkpoint.path, checkpoint.file_format, checkpoint.metadata)
    except BadInputError as error:
        detail = f"there is no tokenizer to go with the weights, so that the output takes no text: {error}"
        return [Notice("no_tokenizer", detail)]
    return []

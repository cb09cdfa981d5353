"""The tensors of any checkpoint in Hugging Face's conventions: names, row order, norm gains, dense values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm_models.checkpoint.tensor_names import GGUF_ONLY, hf_name
from edgellm_models.errors import BadInputError
from edgellm_quantize.capture import STAGE_STEMS
from edgellm_quantize.source_check import used_tensors

if TYPE_CHECKING:
    import torch

    from edgellm_models.checkpoint.reader import Checkpoint
    from edgellm_models.network.spec import ModelSpec
    from edgellm_quantize.recipe import QuantizedLinear

_GAIN_MINUS_ONE = ("gemma2", "gemma3")
_CHECKED_WEIGHTS = 4 << 20
"""Weights that are looked at once: the masks of a large table would be as large as itself."""
_LINEAR_STEMS = frozenset(stem for stems in STAGE_STEMS.values() for stem in stems)


def is_block_linear(name: str) -> bool:
    """Whether a canonical name is a linear inside a decoder block: what GPTQ and AWQ quantize."""
    parts = name.split(".")
    return len(parts) == 4 and parts[0] == "blk" and parts[2] in _LINEAR_STEMS and parts[3] == "weight"


class HFTensors:
    """Undoes what a GGUF does to tensors; of a Hugging Face folder it gives them as they are."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        """Errors as source_check.used_tensors."""
        used = used_tensors(checkpoint, spec)
        self.notices = used.notices
        """What of the source is left out."""
        self.checkpoint = checkpoint
        self.spec = spec
        self._from_gguf = checkpoint.file_format == "gguf"
        self.infos = {
            name: info
            for name, info in checkpoint.tensors().items()
            if name in used.names and name not in GGUF_ONLY
        }
        """Canonical name -> TensorInfo of what a folder holds."""

    def name(self, canonical: str) -> str:
        """The name in a Hugging Face folder."""
        found = hf_name(self.spec.architecture, canonical)
        assert found is not None, canonical
        return found

    def dense(self, canonical: str) -> torch.Tensor:
        """Values in the type of the file, decoded where they are codes. BadInputError for NaN, infinity."""
        import torch

        from edgellm_kernels.weights import DenseWeight, prepare

        info = self.infos[canonical]
        if len(info.shape) == 2:
            weight = self.checkpoint.weight(canonical)
            prepared = (
                weight if isinstance(weight, DenseWeight) else prepare(weight, op="linear", hold="dense")
            )
            assert isinstance(prepared, DenseWeight)
            values = prepared.data
        else:
            values = self.checkpoint.vector(canonical)
        step = max(1, _CHECKED_WEIGHTS // max(1, values[:1].numel()))
        for start in range(0, len(values), step):
            finite = torch.isfinite(values[start : start + step])
            if not bool(finite.all()):
                place = [int(index) for index in torch.nonzero(~finite)[0]]
                place[0] += start
                raise BadInputError(
                    f"tensor {info.file_name} has the value {float(values[tuple(place)])} at {place}: the "
                    "model is damaged"
                )
            self.checkpoint.release_pages()
        return self._rearranged(canonical, values)

    def reorder(self, canonical: str, linear: QuantizedLinear) -> QuantizedLinear:
        """A linear whose rows lie as in the source, with rows as a folder has them."""
        zeros = linear.zeros
        return replace(
            linear,
            codes=self._rearranged(canonical, linear.codes),
            scales=self._rearranged(canonical, linear.scales),
            zeros=None if zeros is None else self._rearranged(canonical, zeros),
        )

    def _rearranged(self, canonical: str, values: torch.Tensor) -> torch.Tensor:
        if not self._from_gguf:
            return values
        stem = canonical.split(".")[-2]
        heads = {"attn_q": self.spec.num_heads, "attn_k": self.spec.num_kv_heads}.get(stem)
        if self.spec.permuted_qk and heads is not None:
            return split_rotary(values, heads, self.spec.ropes[0].dims)
        if self.spec.architecture in _GAIN_MINUS_ONE and stem.endswith("norm"):
            return values - 1.0
        return values


def split_rotary(values: torch.Tensor, heads: int, dims: int) -> torch.Tensor:
    """Rows of each head from GGUF's interleaved rotary order into the half-split one.

    Rows 2i and 2i + 1 go to i and i + dims/2.
    [heads * head_dim, ...] to the same shape; rows of a head behind the rotated ``dims`` stay.
    """
    import torch

    head_dim = values.shape[0] // heads
    in_head = [*range(0, dims, 2), *range(1, dims, 2), *range(dims, head_dim)]
    order = (torch.arange(heads)[:, None] * head_dim + torch.tensor(in_head)).flatten()
    return values[order]

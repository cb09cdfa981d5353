"""Rotary position embedding: inverse frequencies of every scaling, cos and sin of a batch, in f32.

Equal to Transformers' ROPE_INIT_FUNCTIONS. Angles are computed per pass rather than looked up: a table in
half precision makes positions above 256 collide, one in f32 for a long context costs more memory than the
angles do time.

Length-dependent scalings. dynamic and longrope turn all positions by other angles once a sequence is longer
than ``RopeSpec.switch_length``; Transformers decides by the largest position of each call. With a KV cache
that would mix K of both kinds in one sequence and make a chunked prompt differ from a whole one. Here the
choice is per sequence and made by ``ForwardBatch.rope_lengths``, so it depends neither on chunk borders nor
on other sequences, and whoever plans the sequence recomputes it when it grows past
``ModelSpec.rope_switch_length``.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import torch

from edgellm_kernels.ops import RopeAngles, rope_angles
from edgellm_models.network.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, length: int = 0) -> torch.Tensor:
    """Radians per position of each rotated pair: f32 [dims / 2].

    ``length`` (tokens of the sequence) matters to dynamic and longrope only. Arithmetic in f32 and in the
    order of the published code, since position times an error of one unit in the last place shows in long
    prompts.
    """
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    if rope.scaling == "yarn":
        frequencies = _yarn(rope, rope.base**exponents)
    elif rope.scaling == "longrope":
        assert rope.original_context is not None
        factors = rope.long_factors if length > rope.original_context else rope.short_factors
        frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.base**exponents)
    elif rope.scaling == "dynamic":
        assert rope.original_context is not None
        stretch = rope.factor * max(length, rope.original_context) / rope.original_context - (rope.factor - 1)
        frequencies = 1.0 / ((rope.base * stretch ** (rope.dims / (rope.dims - 2))) ** exponents)
    else:
        frequencies = 1.0 / (rope.base**exponents)
        if rope.scaling == "linear":
            frequencies = frequencies / rope.factor
        elif rope.scaling == "llama3":
            frequencies = _llama3(rope, frequencies)
    if rope.freq_divisors:
        frequencies = frequencies / torch.tensor(rope.freq_divisors, dtype=torch.float32)
    return frequencies


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied with (1 except for yarn and longrope)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)
    if rope.scaling == "longrope" and rope.factor > 1:
        assert rope.original_context is not None
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between blended."""
    assert rope.original_context is not None
    waves = 2 * math.pi / frequencies
    slowed = torch.where(
        waves > rope.original_context / rope.low_freq_factor, frequencies / rope.factor, frequencies
    )
    share = (rope.original_context / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * slowed / rope.factor + share * slowed
    short = waves < rope.original_context / rope.high_freq_factor
    long = waves > rope.original_context / rope.low_freq_factor
    return torch.where(short | long, slowed, blended)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: RopeSpec, periods: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones. periods: base^(2i / dims)."""
    context = rope.original_context
    assert context is not None

    def dimension(rotations: float) -> float:
        # The dimension that turns this often over the original context.
        return (rope.dims * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


class Rope:
    """One rotary embedding on a device."""

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.factor = attention_factor(spec)
        self._short = inverse_frequencies(spec).to(self.device)

    def _by_length(self, lengths: torch.Tensor | None, counts: torch.Tensor) -> torch.Tensor:
        """[pairs], or [tokens, pairs] where sequences of this batch differ. lengths, counts: [sequences]."""
        limit = self.spec.switch_length
        if limit is None or lengths is None:
            return self._short
        long = sorted({length for length in lengths.tolist() if length > limit})
        if not long:
            return self._short
        if self.spec.scaling == "longrope":
            long = long[:1]  # all long sequences turn alike
        rows = [
            0 if length <= limit else min(bisect_left(long, length), len(long) - 1) + 1
            for length in lengths.tolist()
        ]
        table = torch.stack([inverse_frequencies(self.spec, length) for length in (0, *long)]).to(self.device)
        return table.to(self.device)[torch.tensor(rows, device=self.device).repeat_interleave(counts)]

    def frequencies(
        self, num_tokens: int, lengths: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Radians per position: f32 [pairs], or [tokens, pairs] where the sequences of a batch differ.

        lengths: [sequences], by which length-dependent scalings choose; None is short. counts: int64
        [sequences], tokens of each sequence in the batch.
        """
        frequencies = self._by_length(lengths, counts)
        if frequencies.ndim == 2 and len(frequencies) < num_tokens:
            # Rows behind the last sequence are padding: any angle serves.
            padding = frequencies.new_zeros((num_tokens - len(frequencies), frequencies.shape[1]))
            frequencies = torch.cat((frequencies, padding))
        return frequencies

    def cos_sin(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor | None,
        counts: torch.Tensor,
        angles: RopeAngles = rope_angles,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin times the attention factor: f32 [tokens, dims / 2] each, as ``angles`` computes them.

        positions: int64 [tokens]. lengths, counts: see ``frequencies``.
        """
        return angles(positions, self.frequencies(len(positions), lengths, counts), self.factor)

"""The values of one quantized linear: codes, scales and zero points unpacked into the kernels' form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edgellm_models.checkpoint.bit_packing import (
    Codes,
    Words,
    unpack_awq,
    unpack_words,
    zeros_from_gptqmodel_three_bits,
    zeros_from_v1,
)
from edgellm_models.checkpoint.packed_linears import PackedLinear, group_size_of
from edgellm_models.errors import BadInputError

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import Int4Weight, Int8Weight


_UNCLEAR_GPTQMODEL = (5, 6)
"""Major versions of GPTQModel whose 3-bit zero points are not known: 4.2.5 takes a pattern off whole words,
7.7.0 one off each field."""


def read_packed(
    linear: PackedLinear, view: Callable[[str], torch.Tensor], label: str
) -> Int4Weight | Int8Weight:
    """The weight of a linear; ``view`` gives a tensor of the file by its name.

    BadInputError, which begins with ``label``, names the values that no weight can have.
    """
    import torch

    from edgellm_kernels.int_groups import int_weight

    method = linear.form.method
    index = None
    zeros: Codes | None
    if method == "gptq":
        codes, zeros = _gptq_codes(linear, view, label)
        scales = view(linear.tensors["scales"].name).t()
        index = _group_index(linear, view, scales.shape[1], label)
    elif method == "awq":
        codes = unpack_awq(_words(view(linear.tensors["qweight"].name))).T
        zeros = unpack_awq(_words(view(linear.tensors["qzeros"].name))).T
        scales = view(linear.tensors["scales"].name).t()
    else:
        codes, zeros = _compressed_codes(linear, view)
        scales = view(linear.tensors["weight_scale"].name)
        if "weight_g_idx" in linear.tensors:
            index = view(linear.tensors["weight_g_idx"].name).to(torch.int32)
    if not bool(torch.isfinite(scales).all()):
        raise BadInputError(f"{label}: a scale is not finite: the file is damaged")
    if zeros is not None and bool((zeros == 1 << (linear.bits - 1)).all()):
        zeros = None
    try:
        return int_weight(
            torch.from_numpy(np.ascontiguousarray(codes)),
            scales.contiguous(),
            linear.bits,
            group_size_of(linear, scales.shape[1], label),
            None if zeros is None else torch.from_numpy(np.ascontiguousarray(zeros)),
            index,
        )
    except ValueError as error:
        raise BadInputError(f"{label}: {error}") from None


def _words(tensor: torch.Tensor) -> Words:
    words: Words = tensor.numpy().view(np.uint32)
    return words


def _gptq_codes(linear: PackedLinear, view: Callable[[str], torch.Tensor], label: str) -> tuple[Codes, Codes]:
    """Codes [N, K] and true zero points [N, groups]."""
    codes = unpack_words(np.ascontiguousarray(_words(view(linear.tensors["qweight"].name)).T), linear.bits)
    words = _words(view(linear.tensors["qzeros"].name))
    form = linear.form
    if not form.stored_minus_one:
        return codes, unpack_words(words, linear.bits).T
    zeros = zeros_from_v1(words, linear.bits)
    if linear.bits == 3 and not (form.symmetric and bool((zeros == 4).all())):
        # NOTE: two dialects share a name. A symmetric file shows which it is; else its writer does.
        theirs = zeros_from_gptqmodel_three_bits(words)
        if form.symmetric and bool((theirs == 4).all()):
            return codes, theirs.T
        if form.gptqmodel in _UNCLEAR_GPTQMODEL:
            raise BadInputError(
                f"{label}: asymmetric codes of 3 bits in the format gptq by GPTQModel {form.gptqmodel}: "
                "versions before 7 store these zero points in two ways; gptq_v2 has one"
            )
        if form.gptqmodel is not None and form.gptqmodel < min(_UNCLEAR_GPTQMODEL):
            zeros = theirs
    return codes, zeros.T


def _compressed_codes(
    linear: PackedLinear, view: Callable[[str], torch.Tensor]
) -> tuple[Codes, Codes | None]:
    """Codes and zero points, both with 2^(bits - 1) added as pack-quantized stores them."""
    bits, tensors = linear.bits, linear.tensors
    zeros: Codes | None = None
    if linear.form.method == "int-quantized":
        codes = view(tensors["weight"].name).numpy().view(np.uint8) ^ np.uint8(0x80)
        if "weight_zero_point" in tensors:
            zeros = view(tensors["weight_zero_point"].name).numpy().view(np.uint8) ^ np.uint8(0x80)
        return codes, zeros
    words = _words(view(tensors["weight_packed"].name))
    codes = unpack_words(words, bits)[:, : linear.in_features]
    if "weight_zero_point" in tensors:
        words = np.ascontiguousarray(_words(view(tensors["weight_zero_point"].name)).T)
        zeros = unpack_words(words, bits).T[: linear.out_features]
    return codes, zeros


def _group_index(
    linear: PackedLinear, view: Callable[[str], torch.Tensor], groups: int, label: str
) -> torch.Tensor | None:
    """The group of each column, or None where columns are in their own order."""
    if "g_idx" not in linear.tensors:
        if linear.form.desc_act and groups > 1:
            raise BadInputError(f"{label}: desc_act is true, but g_idx, which tells the order, is missing")
        return None
    index = view(linear.tensors["g_idx"].name)
    if groups > 1 and not bool(index.any()):
        # All zero is what some writers leave where there is no order; with desc_act it would be a lost one.
        if linear.form.desc_act:
            raise BadInputError(
                f"{label}: desc_act is true, but g_idx puts all columns into the first of {groups} groups"
            )
        return None
    return index

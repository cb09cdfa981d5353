"""Rotary embeddings from a config.json: every spelling of their parameters that Transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_models.errors import BadInputError
from edgellm_models.metadata_values import (
    metadata_bool,
    metadata_float,
    metadata_float_list,
    metadata_int,
    metadata_str,
)
from edgellm_models.network import spec_checks as limits
from edgellm_models.network.spec import RopeSpec

FULL = "full_attention"
SLIDING = "sliding_attention"
_KINDS = (FULL, SLIDING)
_TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def read_ropes(
    config: Mapping[str, Any], family: str, head_dim: int, context: int
) -> tuple[tuple[RopeSpec, ...], dict[str, int]]:
    """The ropes of a model and the index of each layer kind's; equal ones are one."""
    ropes: list[RopeSpec] = []
    index = {}
    for kind, parameters in _parameters_by_kind(config, family).items():
        rope = _read_rope(parameters, config, family, head_dim, context)
        if rope not in ropes:
            ropes.append(rope)
        index[kind] = ropes.index(rope)
    return tuple(ropes), index


def _object(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInputError(f"config.json: {key} must be an object, not {value!r:.60}")
    return {name: entry for name, entry in value.items() if entry is not None}


def _parameters_by_kind(config: Mapping[str, Any], family: str) -> dict[str, dict[str, Any]]:
    """Each layer kind's parameters, rope_theta among them. An old rope_scaling wins over rope_parameters."""
    scaling, given = _object(config, "rope_scaling"), _object(config, "rope_parameters")
    if family == "gemma3":
        # The sliding layers have a base of their own and are never scaled by rope_scaling.
        base = given if any(kind in given for kind in _KINDS) else {FULL: given}
        full, sliding = _object(base, FULL), _object(base, SLIDING)
        full |= _object(scaling, FULL) if FULL in scaling else scaling
        full.setdefault("rope_theta", _theta(config, "rope_theta", 1_000_000.0))
        sliding.setdefault("rope_theta", _theta(config, "rope_local_base_freq", 10_000.0))
        return {FULL: full, SLIDING: sliding}
    block = scaling or given
    theta = _theta(config, "rope_theta", 10_000.0)
    if any(kind in block for kind in _KINDS):
        return {kind: {"rope_theta": theta} | _object(block, kind) for kind in _KINDS}
    return dict.fromkeys(_KINDS, {"rope_theta": theta} | block)


def _theta(holder: Mapping[str, Any], key: str, default: float) -> float:
    return metadata_float(holder, key, default, minimum=1.0, maximum=limits.MAX_ROPE_BASE)


def _factor(holder: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
    return metadata_float(holder, key, default, minimum=limits.MIN_FACTOR, maximum=limits.MAX_FACTOR)


def _read_rope(
    parameters: Mapping[str, Any], config: Mapping[str, Any], family: str, head_dim: int, context: int
) -> RopeSpec:
    name = metadata_str(parameters, "rope_type", None) or metadata_str(parameters, "type", "default")
    if family == "phi3" and name == "yarn":
        name = "longrope"  # the first Phi-3 files called it that
    if name not in _TYPES:
        raise BadInputError(
            f"config.json: rope type {name!r} is not supported; supported are {', '.join(_TYPES)}"
        )
    scaling = _TYPES[name]
    base = _theta(parameters, "rope_theta", 10_000.0)
    dims = _rotated(parameters, config, family, head_dim)
    if scaling == "none":
        return RopeSpec(base=base, dims=dims)
    if scaling == "linear":
        return RopeSpec(base=base, dims=dims, scaling=scaling, factor=_required(parameters, "factor", name))
    if scaling == "dynamic":
        factor = _required(parameters, "factor", name)
        return RopeSpec(base=base, dims=dims, scaling=scaling, factor=factor, original_context=context)

    original = _original_context(parameters, config, family, context)
    if scaling == "llama3":
        low = _required(parameters, "low_freq_factor", name)
        high = _required(parameters, "high_freq_factor", name)
        if high <= low:
            raise BadInputError(f"config.json: high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeSpec(
            base=base,
            dims=dims,
            scaling=scaling,
            factor=_required(parameters, "factor", name),
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = _factor(parameters, "factor") or context / original
    attention_factor = _factor(parameters, "attention_factor")
    if scaling == "longrope":
        return RopeSpec(
            base=base,
            dims=dims,
            scaling=scaling,
            factor=factor,
            original_context=original,
            attention_factor=attention_factor,
            short_factors=_factors(parameters, "short_factor", dims),
            long_factors=_factors(parameters, "long_factor", dims),
        )
    return RopeSpec(
        base=base,
        dims=dims,
        scaling=scaling,
        factor=factor,
        original_context=original,
        attention_factor=attention_factor,
        beta_fast=_factor(parameters, "beta_fast", 32.0) or 32.0,
        beta_slow=_factor(parameters, "beta_slow", 1.0) or 1.0,
        truncate=metadata_bool(parameters, "truncate", True),
        mscale=metadata_float(parameters, "mscale", None, minimum=0.0, maximum=limits.MAX_FACTOR),
        mscale_all_dim=metadata_float(
            parameters, "mscale_all_dim", None, minimum=0.0, maximum=limits.MAX_FACTOR
        ),
    )


def _rotated(parameters: Mapping[str, Any], config: Mapping[str, Any], family: str, head_dim: int) -> int:
    """Rotated elements of a head: int(head_dim * partial_rotary_factor)."""
    share = metadata_float(parameters, "partial_rotary_factor", None, minimum=0.0, maximum=1.0)
    if share is None:
        share = metadata_float(config, "partial_rotary_factor", 1.0, minimum=0.0, maximum=1.0)
    if share != 1.0 and family != "phi3":
        raise BadInputError(f"config.json: partial_rotary_factor {share} is not known of {family} models")
    return int(head_dim * share)


def _required(parameters: Mapping[str, Any], key: str, name: str) -> float:
    value = _factor(parameters, key)
    if value is None:
        raise BadInputError(f"config.json: rope type {name!r} needs {key!r}")
    return value


def _original_context(
    parameters: Mapping[str, Any], config: Mapping[str, Any], family: str, context: int
) -> int:
    key = "original_max_position_embeddings"
    outside = metadata_int(
        config, key, 4096 if family == "phi3" else None, minimum=1, maximum=limits.MAX_CONTEXT
    )
    if outside is not None:
        return outside
    # Some files write 8192.0.
    value = metadata_float(parameters, key, float(context), minimum=1.0, maximum=float(limits.MAX_CONTEXT))
    if value != int(value):
        raise BadInputError(f"config.json: {key} must be a whole number, not {value}")
    return int(value)


def _factors(parameters: Mapping[str, Any], key: str, dims: int) -> tuple[float, ...]:
    if key not in parameters:
        raise BadInputError(f"config.json: rope type 'longrope' needs {key!r}")
    values = metadata_float_list(parameters, key)
    if len(values) != dims // 2:
        raise BadInputError(
            f"config.json: {key} has {len(values)} values for {dims} rotated elements: {dims // 2} needed"
        )
    if not all(limits.MIN_FACTOR <= value <= limits.MAX_FACTOR for value in values):
        raise BadInputError(f"config.json: {key} must hold positive numbers of at most {limits.MAX_FACTOR:g}")
    return tuple(values)

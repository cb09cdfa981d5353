"""Speeds from bytes and operations: ceilings of decoding and prefill, and where one limit gives way.

A decode step reads every weight once and the KV of every sequence; it can be no faster than memory allows.
Real kernels reach 60 to 80 percent of that ceiling (``USUAL_SHARES``).
"""

from __future__ import annotations

import math

USUAL_SHARES = (0.6, 0.8)
GB = 1e9
"""Bytes: bandwidths are stated in units of 10^9 bytes per second."""


def step_seconds(num_bytes: float, bandwidth_gb_s: float) -> float:
    """The least time of a step that reads ``num_bytes``."""
    return num_bytes / (bandwidth_gb_s * GB)


def decode_ceiling(num_bytes: float, bandwidth_gb_s: float, batch: int = 1) -> float:
    """Tokens per second of all sequences that no kernel can pass; ``num_bytes`` are those of the step."""
    return batch / step_seconds(num_bytes, bandwidth_gb_s)


def prefill_seconds(parameters: float, tokens: int, tflops: float) -> float:
    """The least time for a prompt: two operations per weight and token; attention comes on top."""
    return 2.0 * parameters * tokens / (tflops * 1e12)


def ridge(tflops: float, bandwidth_gb_s: float) -> float:
    """Operations per byte at which memory and arithmetic take equally long."""
    return tflops * 1e12 / (bandwidth_gb_s * GB)


def operations_per_byte(bits_per_weight: float, batch: int = 1) -> float:
    """Operations per byte of weights read: two per weight and sequence."""
    return 2.0 * batch * 8.0 / bits_per_weight


def compute_bound_batch(bits_per_weight: float, tflops: float, bandwidth_gb_s: float) -> float:
    """The batch from which a decode step's products, not its weights, take the time."""
    return ridge(tflops, bandwidth_gb_s) / operations_per_byte(bits_per_weight)


def kv_passes_weights(step_bytes: int, kv_bytes_per_token: float) -> int:
    """Positions of all sequences together from which the KV read per step is more than the weights."""
    return math.ceil(step_bytes / kv_bytes_per_token)


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens on a machine that costs ``price_per_hour``."""
    return price_per_hour / (tokens_per_s * 3600.0) * 1e6

"""The writers of model files, one name each."""

from __future__ import annotations

from edgellm_quantize.dense_gguf import DenseGGUFReport, write_dense_gguf
from edgellm_quantize.quantized_gguf import QuantizedPlan, write_planned_gguf, write_quantized_gguf

__all__ = [
    "DenseGGUFReport",
    "QuantizedPlan",
    "write_dense_gguf",
    "write_planned_gguf",
    "write_quantized_gguf",
]

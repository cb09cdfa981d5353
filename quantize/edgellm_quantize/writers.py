"""The writers of model files, one name each."""

from __future__ import annotations

from edgellm_quantize.dense_gguf import DenseGGUFReport, write_dense_gguf

__all__ = ["DenseGGUFReport", "write_dense_gguf"]

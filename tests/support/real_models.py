"""Finds the two real models that tests run, fetching each once into a cache of its own."""

from __future__ import annotations

import os
from pathlib import Path


def real_model(name: str) -> Path:
    """Path of the GGUF file of ``smollm2-135m`` or ``gemma3-270m``.

    ``EDGELLM_TEST_MODELS`` names a folder with ``NAME.gguf`` files; without it the model is pulled through the
    catalog, as a user's first chat does.
    """
    folder = os.environ.get("EDGELLM_TEST_MODELS")
    if folder:
        return Path(folder) / f"{name}.gguf"
    raise RuntimeError("EDGELLM_TEST_MODELS is not set")

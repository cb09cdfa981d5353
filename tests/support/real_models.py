"""Finds the two real models that tests run, fetching each once into a cache of its own."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

REAL_MODELS = ("smollm2-135m", "gemma3-270m")


@cache
def real_model(name: str) -> Path:
    """Path of the GGUF file of ``smollm2-135m`` or ``gemma3-270m``.

    ``EDGELLM_TEST_MODELS`` names a folder with ``NAME.gguf`` files. Without it the model is pulled through
    the catalog, as a user's first chat does, into a folder that later runs find again (``EDGELLM_TEST_HOME``,
    or ``edgellm-tests`` in the user's cache folder). Without a network that fails; it never skips.
    """
    folder = os.environ.get("EDGELLM_TEST_MODELS")
    if folder:
        return Path(folder) / f"{name}.gguf"

    import platformdirs

    from edgellm_models.catalog import load_catalog, pull_model

    home = Path(os.environ.get("EDGELLM_TEST_HOME") or platformdirs.user_cache_path("edgellm-tests"))
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name} into {models} unless it is there", file=sys.stderr)
    return pull_model(load_catalog()[name], models).path

"""Where compiled GPU kernels are kept between runs: a folder that can be written, else a temporary one."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path

from edgellm_models.errors import Notice

VARIABLE = "TRITON_CACHE_DIR"
FOLDER = "kernels"


def use_kernel_cache(cache: Path, environ: MutableMapping[str, str] | None = None) -> Notice | None:
    """Names the folder to Triton: the user's own choice or ``cache``/kernels, made and tried out.

    Where nothing can be written there it is a temporary folder that goes with this process, and the notice
    says so: the kernels are then compiled at every start.
    """
    environ = os.environ if environ is None else environ
    wanted = Path(environ.get(VARIABLE) or cache / FOLDER)
    problem = _why_not(wanted)
    if problem is None:
        environ[VARIABLE] = str(wanted)
        return None
    folder = tempfile.mkdtemp(prefix="edgellm-kernels-")
    atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
    environ[VARIABLE] = folder
    detail = (
        f"compiled GPU kernels cannot be kept in {wanted} ({problem}): they go to {folder} and are compiled "
        f"anew at the next start; {VARIABLE} names another folder"
    )
    return Notice("kernel_cache", detail)


def _why_not(folder: Path) -> str | None:
    """What the system says where the folder cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)

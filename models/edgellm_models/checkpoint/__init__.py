"""Reading model files: opens a GGUF file or a Hugging Face folder as a Checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm_models.checkpoint.reader import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (any shard of a split one) or a Hugging Face folder; the content decides, not the
    name.

    Reads and checks headers only, and loads no torch before the first weight is asked for. Raises
    NotFoundError for a missing file or shard, PermissionDeniedError, and BadInputError for everything that is
    damaged or unsupported.
    """
    from edgellm_models.checkpoint.mapped_file import file_error, is_folder

    path = Path(path)
    try:
        if is_folder(path):
            from edgellm_models.checkpoint.safetensors_reader import open_folder

            return open_folder(path)
        from edgellm_models.checkpoint.gguf_reader import open_gguf

        return open_gguf(path)
    except OSError as error:  # listing a folder, looking for a shard
        raise file_error(Path(error.filename or path), error) from error

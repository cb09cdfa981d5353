"""``edgellm serve`` with a scripted model: ``python -m tests.support.fake_serve serve ...``. No torch.

FAKE_LOAD_S: seconds that loading takes; FAKE_LOAD_ERROR: what it fails with; FAKE_STEP_S: of every step.
"""

from __future__ import annotations

import os
import time

import edgellm.cli.serve
from edgellm.server.model_host import ServedModel
from edgellm_models.errors import ResourceError
from tests.support.served import scripted_model


def load(loader: edgellm.cli.serve.ModelLoader) -> ServedModel:
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    if os.environ.get("FAKE_LOAD_ERROR"):
        raise ResourceError(os.environ["FAKE_LOAD_ERROR"])
    return scripted_model(delay_s=float(os.environ.get("FAKE_STEP_S", "0"))).model


if __name__ == "__main__":
    edgellm.cli.serve.ModelLoader._load = load  # type: ignore[method-assign]
    from edgellm.cli.main import main

    main()

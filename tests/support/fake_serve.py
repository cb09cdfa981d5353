"""``edgellm serve`` with a scripted model: ``python -m tests.support.fake_serve serve ...``. No torch.

FAKE_LOAD_S: seconds that loading takes; FAKE_LOAD_ERROR: what it fails with; FAKE_STEP_S: of every step;
FAKE_GATE: a file without which no step runs.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import edgellm.cli.serve
from edgellm.server.model_host import ServedModel
from edgellm_models.errors import ResourceError
from tests.support.served import StepGate, scripted_model


def load(loader: edgellm.cli.serve.ModelLoader) -> ServedModel:
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    if os.environ.get("FAKE_LOAD_ERROR"):
        raise ResourceError(os.environ["FAKE_LOAD_ERROR"])
    gate = StepGate()
    if os.environ.get("FAKE_GATE"):
        threading.Thread(target=open_at, args=(gate, Path(os.environ["FAKE_GATE"])), daemon=True).start()
    else:
        gate.open()
    return scripted_model(delay_s=float(os.environ.get("FAKE_STEP_S", "0")), gate=gate).model


def open_at(gate: StepGate, path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
    gate.open()


if __name__ == "__main__":
    edgellm.cli.serve.ModelLoader._load = load  # type: ignore[method-assign]
    from edgellm.cli.main import main

    main()

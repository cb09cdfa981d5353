"""Logits of a quantized folder as transformers computes them, for acceptance/folders_elsewhere.py to compare.

Runs in a Python of its own, where transformers and GPTQModel are (``pip install gptqmodel optimum
accelerate compressed-tensors``); edgellm neither needs nor imports GPTQModel:

    python tools/logits_with_transformers.py FOLDER TOKENS.json OUT.npy [--float32]

It computes in the type that the folder declares, or in f32. TOKENS.json is a list of lists of ids of one
length; OUT.npy is f32 [sequences, tokens, vocabulary].
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, (os.cpu_count() or 1) // 2)))
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    chosen = {"dtype": torch.float32} if options.float32 else {}
    model = AutoModelForCausalLM.from_pretrained(str(options.folder), device_map="cpu", **chosen)
    ids = torch.tensor(json.loads(options.tokens.read_text(encoding="utf-8")))
    with torch.inference_mode():
        logits = model(ids).logits.float().numpy()
    np.save(options.out, logits)
    linears = sorted({type(module).__name__ for module in model.modules() if hasattr(module, "qweight")})
    packages = ("transformers", "gptqmodel", "compressed-tensors")
    found = {
        "linears": linears,
        "dtype": str(model.dtype),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

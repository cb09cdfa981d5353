"""Quantizes a Hugging Face folder with GPTQModel as it comes, for acceptance/quantize_quality.py to compare.

Runs in a Python of its own, where GPTQModel is (``pip install gptqmodel optimum accelerate``); edgellm
neither needs nor imports it. The text is token ids, so that both tools see the same:

    python tools/quantize_with_gptqmodel.py MODEL TOKENS.json OUT [--bits 4] [--group-size 64]

TOKENS.json is a list of lists of ids. Everything but bits, group and device is GPTQModel's default.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    options = parser.parse_args()

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # Its own default on up to two cores is one worker, which it then refuses for its loader.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, (os.cpu_count() or 1) // 2)))
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    sequences = json.loads(options.tokens.read_text(encoding="utf-8"))
    calibration = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in sequences]
    config = QuantizeConfig(bits=options.bits, group_size=options.group_size, device="cpu")
    model = GPTQModel.load(str(options.model), config, dtype=torch.float32)
    began, used = time.monotonic(), time.process_time()
    model.quantize(calibration, batch_size=1)
    seconds, processor = time.monotonic() - began, time.process_time() - used
    model.save(str(options.out))
    settings = {
        key: getattr(config, key, None)
        for key in ("bits", "group_size", "sym", "desc_act", "act_group_aware", "damp_percent", "mse")
    }
    found = {
        "peer": f"GPTQModel {importlib.metadata.version('gptqmodel')}",
        "seconds": seconds,
        "processor_seconds": processor,
        "settings": settings,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

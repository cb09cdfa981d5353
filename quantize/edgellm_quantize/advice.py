"""What a user is told of a recipe that works and that they will hardly want."""

from __future__ import annotations

from edgellm_models.errors import Notice
from edgellm_quantize.recipe import QuantizeJob

_FEW_BITS = 3


def few_bits_notice(job: QuantizeJob) -> list[Notice]:
    """Of two or three bits with nothing that says which columns matter.

    Measured on two small models: integers of 3 bits lose 1.7 and 5.4 nats so, 0.26 and 0.50 with a
    calibration; of 2 bits nothing of use is left. Q3_K_M loses 0.17 and 0.32, with one 0.042 and 0.14.
    """
    recipe = job.recipe
    if job.calibration.source != "none" or job.imatrix is not None or recipe.format == "hf":
        return []
    if recipe.format == "gguf":
        if recipe.target_bpw is not None or not recipe.type.startswith(("Q2_K", "Q3_K")):
            return []
        bits = int(recipe.type[1])
    else:
        bits = recipe.bits
    if bits > _FEW_BITS:
        return []
    detail = (
        f"{bits} bits without a calibration lose several times what they lose with one: --calibration FILE, "
        "or self (the model writes its own text)"
    )
    return [Notice("few_bits_uncalibrated", detail)]

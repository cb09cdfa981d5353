"""The tensor types of GGUF files: id, name, elements and bytes of a block. Plain data, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TypeRole(enum.Enum):
    """What a reader does with tensors of a type."""

    DENSE = "dense"
    """Plain floating point, used as it lies in the file."""
    BLOCK = "block"
    """A member of weights.BlockLayout, used as it lies in the file."""
    CONVERTED = "converted"
    """Decoded and held as Q8_0."""
    INTEGER = "integer"
    """Plain integers: never a weight, skipped."""
    UNSUPPORTED = "unsupported"
    """The size is known, the content is not read."""


@dataclass(frozen=True)
class GGMLType:
    """One tensor type: ``block_elements`` weights lie in ``block_bytes`` bytes."""

    type_id: int
    name: str
    block_elements: int
    block_bytes: int
    role: TypeRole

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of ``elements`` weights. ValueError if it is not a whole number of blocks."""
        blocks, rest = divmod(elements, self.block_elements)
        if rest:
            raise ValueError(
                f"{elements} is not a multiple of the {self.name} block of {self.block_elements}"
            )
        return blocks * self.block_bytes


_D, _B, _C, _I, _U = TypeRole

_TABLE = (
    (0, "F32", 1, 4, _D),
    (1, "F16", 1, 2, _D),
    (2, "Q4_0", 32, 18, _B),
    (3, "Q4_1", 32, 20, _B),
    (6, "Q5_0", 32, 22, _B),
    (7, "Q5_1", 32, 24, _B),
    (8, "Q8_0", 32, 34, _B),
    (9, "Q8_1", 32, 40, _U),
    (10, "Q2_K", 256, 84, _B),
    (11, "Q3_K", 256, 110, _B),
    (12, "Q4_K", 256, 144, _B),
    (13, "Q5_K", 256, 176, _B),
    (14, "Q6_K", 256, 210, _B),
    (15, "Q8_K", 256, 292, _U),
    (16, "IQ2_XXS", 256, 66, _C),
    (17, "IQ2_XS", 256, 74, _C),
    (18, "IQ3_XXS", 256, 98, _C),
    (19, "IQ1_S", 256, 50, _C),
    (20, "IQ4_NL", 32, 18, _C),
    (21, "IQ3_S", 256, 110, _C),
    (22, "IQ2_S", 256, 82, _C),
    (23, "IQ4_XS", 256, 136, _C),
    (24, "I8", 1, 1, _I),
    (25, "I16", 1, 2, _I),
    (26, "I32", 1, 4, _I),
    (27, "I64", 1, 8, _I),
    (28, "F64", 1, 8, _U),
    (29, "IQ1_M", 256, 56, _C),
    (30, "BF16", 1, 2, _D),
    (34, "TQ1_0", 256, 54, _C),
    (35, "TQ2_0", 256, 66, _C),
    (39, "MXFP4", 32, 17, _C),
    (40, "NVFP4", 64, 36, _C),
    (41, "Q1_0", 128, 18, _U),
)
"""ggml.h, enum ggml_type; 4, 5, 31-33 and 36-38 were removed from the format."""

GGML_TYPES: dict[int, GGMLType] = {row[0]: GGMLType(*row) for row in _TABLE}
"""By type id."""

GGML_TYPES_BY_NAME: dict[str, GGMLType] = {entry.name: entry for entry in GGML_TYPES.values()}


def supported_type_names() -> tuple[str, ...]:
    """The types that weights can have, in order of id."""
    roles = (TypeRole.DENSE, TypeRole.BLOCK, TypeRole.CONVERTED)
    return tuple(entry.name for entry in GGML_TYPES.values() if entry.role in roles)

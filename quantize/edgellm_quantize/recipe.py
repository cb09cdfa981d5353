"""What is to be quantized and how, and what came out: the dataclasses that the parts of the toolkit share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from edgellm_models.errors import Notice, UsageError

if TYPE_CHECKING:
    import torch

    from edgellm_kernels.weights import BlockQuantWeight, DenseWeight

FORMATS = ("gguf", "gptq", "awq", "compressed-tensors", "hf")
METHODS = ("auto", "rtn", "gptq", "awq")
EFFORTS = ("fast", "default", "best")
GGUF_DENSE_TYPES = ("F32", "F16", "BF16")
GGUF_TYPES = (
    *("Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *GGUF_DENSE_TYPES,
)
"""Types of a whole file. Types of one tensor: TENSOR_TYPES."""
TENSOR_TYPES = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *GGUF_DENSE_TYPES,
)
DTYPES = ("bf16", "f16", "f32")
WEIGHT_ERROR, OUTPUT_ERROR = "weights", "outputs"
"""What a relative error measures: ||E||^2 / ||W||^2, or tr(E H E^T) / tr(W H W^T) with the Hessian H of the
calibration's inputs, so the squared error of what the linear computes from them."""
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
"""What GPTQModel reads; -1 is one group per row. Other tools read 32, 64, 128 and -1."""

Generate: TypeAlias = Callable[[Sequence[Sequence[int]], int, int], Sequence[Sequence[int]]]
"""Continues prompts for ``self`` calibration: (prompt token ids, most new tokens of each, seed)
-> the new ids of each prompt, sampled at temperature 1. Given by whoever owns an engine.
"""


@dataclass(frozen=True)
class EffortPreset:
    """How much time the searches take. No preset changes the format or the size of what is written."""

    scale_candidates: int
    """Scales that are tried for a group of an integer grid."""
    descent_passes: int
    """Passes over scales with codes fixed and codes with scales fixed, after error feedback."""
    awq_ratios: int
    """Exponents on the grid of the AWQ scale search, beside the identity."""
    asymmetric_calibration: bool
    """Keep the full-precision stream beside the quantized one, for the term that compensates what earlier
    blocks lost: twice the memory for activations."""


EFFORT_PRESETS = {
    "fast": EffortPreset(24, 0, 10, asymmetric_calibration=False),
    "default": EffortPreset(60, 1, 20, asymmetric_calibration=True),
    "best": EffortPreset(100, 3, 40, asymmetric_calibration=True),
}


@dataclass(frozen=True)
class CalibrationSpec:
    """Which text shows what the inputs of the linears look like."""

    source: str = "none"
    """``none``, ``self`` (the model writes its own text) or ``file``."""
    path: Path | None = None
    """UTF-8 text, or JSON lines of {"text"} or {"messages"}; only with ``file``."""
    samples: int = 64
    """Sequences at most."""
    sequence_length: int = 512
    """Tokens of a sequence at most."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.source not in ("none", "self", "file"):
            raise UsageError(f"calibration source {self.source!r} is not known: none, self or file")
        if (self.source == "file") != (self.path is not None):
            raise UsageError("a calibration path goes with the source 'file', and only with it")
        if not 1 <= self.samples <= 1_000_000:
            raise UsageError(f"samples must be from 1 to 1,000,000, not {self.samples}")
        if not 8 <= self.sequence_length <= 1_048_576:
            raise UsageError(f"sequence length must be from 8 to 1,048,576, not {self.sequence_length}")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


@dataclass(frozen=True)
class QuantizeRecipe:
    """What the output holds and how its codes are chosen. Raises UsageError for what no format can be."""

    format: str = "gguf"
    """One of FORMATS."""
    type: str = "Q4_K_M"
    """Of a GGUF file: one of GGUF_TYPES."""
    dtype: str = "bf16"
    """Of a dense Hugging Face folder (``hf``): one of DTYPES."""
    bits: int = 4
    group_size: int | None = None
    """Input columns that share a scale (gptq, awq, compressed-tensors). None chooses: 128, or the largest of
    64 and 32 that divides the in_features of every linear. -1: one scale per row."""
    symmetric: bool = True
    """Zero point fixed in the middle. AWQ is asymmetric always."""
    checkpoint_format: str | None = None
    """Of a GPTQ folder: ``gptq`` (v1: zero points stored minus one) or ``gptq_v2``. None becomes gptq_v2 for
    3 bits, whose v1 zero points readers decode in two ways, and else gptq, which every reader knows."""
    method: str = "auto"
    """``auto``: gptq where there is calibration, else rtn with a scale search; for awq folders awq. In a GGUF
    file gptq is error feedback on the grids of the block types, whose scales are searched with the measured
    importance of the columns; rtn with calibration is that search alone, in all formats."""
    effort: str = "default"
    damping: float = 0.05
    """Share of the mean diagonal that is added to the Hessian's diagonal; raised in steps where need be."""
    target_bpw: float | None = None
    """GGUF only: types are chosen by measured sensitivity to meet this many bits per weight."""
    tensor_types: tuple[tuple[str, str], ...] = ()
    """GGUF only: (regular expression on the tensor name, type of TENSOR_TYPES); the first that matches."""

    def __post_init__(self) -> None:
        # Types are written in either case everywhere: llama-quantize takes q4_k_m too.
        for name, value in (("type", self.type.upper()), ("dtype", self.dtype.lower())):
            object.__setattr__(self, name, value)
        for name in ("format", "method", "effort"):
            object.__setattr__(self, name, getattr(self, name).lower())
        pairs = tuple((pattern, kind.upper()) for pattern, kind in self.tensor_types)
        object.__setattr__(self, "tensor_types", pairs)
        if self.checkpoint_format is None:
            version = "gptq_v2" if self.format == "gptq" and self.bits == 3 else "gptq"
            object.__setattr__(self, "checkpoint_format", version)
        _one_of("format", self.format, FORMATS)
        _one_of("type", self.type, GGUF_TYPES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("method", self.method, METHODS)
        _one_of("effort", self.effort, EFFORTS)
        _one_of("checkpoint format", str(self.checkpoint_format), ("gptq", "gptq_v2"))
        if not 0 < self.damping < 1:
            raise UsageError(f"damping must lie between 0 and 1, not {self.damping}")
        if self.format in ("gptq", "awq", "compressed-tensors"):
            self._check_integer_grid()
        if self.method == "awq" and self.format not in ("awq", "gptq", "compressed-tensors"):
            raise UsageError(f"method awq rescales weights for integer grids; the format is {self.format}")
        if self.format != "gguf" and (self.target_bpw is not None or self.tensor_types):
            raise UsageError(f"a target of bits per weight and tensor types go with GGUF, not {self.format}")
        if self.target_bpw is not None and not 1 < self.target_bpw <= 16:
            raise UsageError(
                f"the target must be above 1 and at most 16 bits per weight, not {self.target_bpw:.12g}"
            )
        for pattern, kind in self.tensor_types:
            _one_of("tensor type", kind, TENSOR_TYPES)
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"tensor type {pattern}={kind}: no regular expression: {error}") from None

    def _check_integer_grid(self) -> None:
        allowed = {"gptq": (2, 3, 4, 8), "awq": (4,), "compressed-tensors": (4, 8)}[self.format]
        if self.bits not in allowed:
            known = ", ".join(str(bits) for bits in allowed)
            raise UsageError(f"{self.format} has no {self.bits} bits; it has {known}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            known = ", ".join(str(size) for size in GROUP_SIZES)
            raise UsageError(f"group size {self.group_size} is read by no tool; known are {known}")

    def record(self) -> dict[str, Any]:
        """Plain values of the fields that the format and the method have a use for: what outputs keep."""
        names = ["format"]
        if self.format == "hf":
            return {name: getattr(self, name) for name in (*names, "dtype")}
        if self.format == "gguf":
            names.append("type" if self.target_bpw is None else "target_bpw")
            if self.tensor_types:
                names.append("tensor_types")
            elif names[-1] == "type" and self.type in GGUF_DENSE_TYPES:
                return {name: getattr(self, name) for name in names}
        else:
            names += ["bits", "group_size", "symmetric"]
            if self.format == "gptq":
                names.append("checkpoint_format")
        names += ["method", "effort"]
        if self.method != "rtn":
            names.append("damping")
        return {name: getattr(self, name) for name in names}

    @property
    def preset(self) -> EffortPreset:
        return EFFORT_PRESETS[self.effort]


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{what} {value!r} is not known; known are {', '.join(known)}")


@dataclass(frozen=True)
class QuantizeProgress:
    """How far a job is."""

    phase: str
    """reading, calibrating, quantizing, writing or checking."""
    done: float
    """Share of the whole job, 0 to 1; never falls."""
    detail: str = ""
    """What is in work, such as ``layer 3 of 30``."""


@dataclass(frozen=True)
class QuantizeJob:
    """One run of the toolkit."""

    source: Path
    """A Hugging Face folder or a GGUF file."""
    out: Path
    """A GGUF file or a folder; must not exist unless a job is resumed."""
    recipe: QuantizeRecipe = field(default_factory=QuantizeRecipe)
    calibration: CalibrationSpec = field(default_factory=CalibrationSpec)
    imatrix: Path | None = None
    """An importance matrix of llama.cpp (GGUF) to read instead of calibrating for weights."""
    save_imatrix: Path | None = None
    work_dir: Path | None = None
    """Finished blocks and their manifest; None is a folder beside ``out``."""
    resume: bool = False
    max_memory: int | None = None
    """Bytes that the job may take."""
    dry_run: bool = False
    on_progress: Callable[[QuantizeProgress], None] | None = None
    generate: Generate | None = None
    """For ``self`` calibration."""


@dataclass(frozen=True)
class QuantizedLinear:
    """One linear on an integer grid: W[n, k] = scales[n, g] (codes[n, k] - zeros[n, g]), g = k // group_size.

    Groups lie along the columns as they are (a trivial g_idx). The codes are what rounding chose: writers
    never compute them again from weights.
    """

    codes: torch.Tensor
    """[N, K] uint8, 0 to 2^bits - 1."""
    scales: torch.Tensor
    """[N, groups] f32 whose values are exact in f16; not 0; negative ones are allowed."""
    zeros: torch.Tensor | None
    """[N, groups] uint8; None where symmetric: 2^(bits - 1)."""
    group_size: int
    """Columns of a group; K where there is one per row. Divides K."""
    bits: int

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True)
class LayerStatistics:
    """What calibration saw at one distinct linear input (q, k and v share one)."""

    hessian: torch.Tensor | None
    """[K, K] f32: the sum of x x^T over tokens; None where only its diagonal was kept."""
    imatrix: torch.Tensor
    """[K] f32: the mean of x^2 over tokens."""
    tokens: int
    """Tokens that were seen; 0 for an expert that none was routed to."""


@dataclass(frozen=True)
class LayerOutcome:
    """One linear after rounding."""

    name: str
    """Canonical name of its weight, such as ``blk.3.attn_q.weight``."""
    weight: QuantizedLinear | BlockQuantWeight | DenseWeight
    relative_error: float | None
    """See ``error_measure``; None where nothing was rounded."""
    seconds: float
    """Of this run: 0 where an earlier one did the work."""
    method: str = "rtn"
    """What was done in the end: rtn, gptq, awq+gptq, copy."""
    notices: tuple[Notice, ...] = ()
    error_measure: str = WEIGHT_ERROR
    """WEIGHT_ERROR, or OUTPUT_ERROR where error feedback had a Hessian."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor of the output."""

    name: str
    type_name: str
    """``Q4_K``, ``int4 g128``, ``BF16`` ..."""
    shape: tuple[int, ...]
    nbytes: int
    """With its scales, zero points and group indices."""
    relative_error: float | None = None
    seconds: float = 0.0
    """Rounding and writing, of this run: what an earlier run did is not counted."""
    method: str = "copy"
    error_measure: str | None = None
    """WEIGHT_ERROR or OUTPUT_ERROR; None without an error."""


@dataclass(frozen=True)
class QuantizeReport:
    """What was written, or with ``dry_run`` what would be."""

    out: Path
    format: str
    type_name: str
    """``Q4_K_M``, ``4 bit g128 symmetric``, ``bf16`` ..."""
    tensors: tuple[TensorReport, ...]
    nbytes: int
    """Bytes of all weight files."""
    num_weights: int
    """Weights of the model, as the source counts them."""
    method: str
    calibration_hash: str | None
    """SHA-256 of the token ids that were seen."""
    calibration_tokens: int
    seconds: float
    """Taken, or estimated."""
    peak_bytes: int
    """Memory: taken, or estimated."""
    dry_run: bool
    notices: tuple[Notice, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors over the model's weights: scales, zero points, embeddings and norms too."""
        return 8 * sum(tensor.nbytes for tensor in self.tensors) / max(1, self.num_weights)

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``--json``; names are stable."""
        return {
            "out": str(self.out),
            "format": self.format,
            "type": self.type_name,
            "method": self.method,
            "bytes": self.nbytes,
            "weights": self.num_weights,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "calibration_hash": self.calibration_hash,
            "calibration_tokens": self.calibration_tokens,
            "seconds": round(self.seconds, 3),
            "peak_bytes": self.peak_bytes,
            "dry_run": self.dry_run,
            "notices": [{"kind": notice.kind, "detail": notice.detail} for notice in self.notices],
            "tensors": [
                {
                    "name": tensor.name,
                    "type": tensor.type_name,
                    "shape": list(tensor.shape),
                    "bytes": tensor.nbytes,
                    "relative_error": tensor.relative_error,
                    "error_measure": tensor.error_measure,
                    "seconds": round(tensor.seconds, 4),
                    "method": tensor.method,
                }
                for tensor in self.tensors
            ],
        }

"""The block encoders: layout and error against ggml's own, native against numpy, hard rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgellm_kernels.native_library import built_libraries, open_library
from edgellm_models.errors import UsageError
from edgellm_quantize.block_grids import GRIDS, decode_blocks
from edgellm_quantize.kquant_codec import (
    encode,
    encode_rows,
    fit_blocks,
    normalized_importance,
    pack,
    round_column,
    unpack,
)
from tests.support.native import backends
from tests.support.oracles import require_oracle

Array = np.ndarray[Any, Any]
TYPES = tuple(GRIDS)
EFFORTS = ("fast", "default", "best")
LOSS_AT_MOST = {"Q4_K": 0.98, "Q5_K": 0.955}
"""Of ggml's RMSE under the default effort."""


def _rows(kind: str = "gauss", rows: int = 16, width: int = 2048) -> Array:
    generator = np.random.default_rng(3)
    if kind == "heavy":
        return (generator.standard_t(5, (rows, width)) / math.sqrt(5 / 3)).astype(np.float32)
    return generator.standard_normal((rows, width)).astype(np.float32)


def _importance(width: int) -> Array:
    return np.exp(np.random.default_rng(4).standard_normal(width)).astype(np.float32)


def _hard_rows() -> Array:
    """Rows that have broken searches: zeros, constants, one sign, denormals, huge and lone values (E09)."""
    rows = _rows(rows=16, width=512) * np.float32(0.05)
    rows[0] = 0
    rows[1] = 0.5
    rows[2] = -3
    rows[3] = -1e-9
    rows[4, :300] = 0
    rows[5] *= np.float32(1e-6)
    rows[6] = np.abs(rows[6])
    rows[7] *= np.float32(1e-20)
    rows[8] = -0.0
    rows[9] = rows[9].round(1)
    rows[10, ::7] = 6e4
    rows[11] = -np.abs(rows[11])
    rows[12] *= np.float32(1e7)
    rows[13, 5] = 1e30
    rows[14] = 1e-40
    return rows


def _decoded(data: Array, name: str) -> Array:
    import gguf

    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", TYPES)
def test_layout_is_ggmls(name: str) -> None:
    """Unpacking and packing ggml's own blocks gives the same bytes; our decoding has gguf's bits."""
    require_oracle("libgguf")
    import gguf
    import libgguf

    grid = GRIDS[name]
    kind = gguf.GGMLQuantizationType[name]
    blocks = libgguf.quantize_rows(_rows(width=1024), int(kind)).reshape(-1, grid.nbytes)
    params, codes = unpack(blocks, name)
    assert np.array_equal(pack(params, codes), blocks)
    expected = gguf.quants.dequantize(blocks, kind)
    assert np.array_equal(decode_blocks(params, codes).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_error_is_below_ggmls(name: str) -> None:
    """Plain and weighted, on Gaussian and heavy-tailed rows, fast and default."""
    require_oracle("libgguf")
    import gguf
    import libgguf

    for kind in ("gauss", "heavy"):
        rows = _rows(kind)
        for importance in (None, _importance(rows.shape[1])):
            weights = 1.0 if importance is None else importance
            peer = libgguf.quantize_rows(rows, int(gguf.GGMLQuantizationType[name]), importance)

            def rmse(data: Array, rows: Array = rows, weights: Any = weights) -> float:
                return math.sqrt((weights * (rows - _decoded(data, name)).astype(np.float64) ** 2).mean())

            limit = rmse(peer)
            fast, default = (rmse(encode(rows, name, importance, effort)) for effort in EFFORTS[:2])
            assert fast <= limit, (kind, importance is not None)
            assert default <= limit * LOSS_AT_MOST.get(name, 1.0), (kind, importance is not None)
            assert default <= fast


@pytest.mark.parametrize("name", TYPES)
def test_native_bytes_are_the_numpy_bytes(name: str) -> None:
    """Whatever the effort, the importance and the number of threads, on ordinary and on hard rows."""
    rows = np.concatenate((_hard_rows(), _rows(rows=3, width=512)))
    per_row = np.abs(rows) + np.float32(0.1)
    for effort in EFFORTS:
        for importance in (None, _importance(512), per_row) if effort == "default" else (_importance(512),):
            twin = encode_rows(rows, name, importance, effort, native=False)
            native = encode_rows(rows, name, importance, effort, native=True, threads=1)
            assert np.array_equal(twin.data, native.data), effort
            assert twin.clipped == native.clipped > 0
    whole = encode_rows(np.tile(rows, (40, 1)), name, threads=3)
    assert np.array_equal(whole.data[: len(rows)], encode_rows(rows, name, threads=1).data)


@pytest.mark.parametrize("backend", backends())
def test_every_back_end_gives_the_same_bytes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable library too, which is built without vectors of this width."""
    library = open_library(built_libraries()[backend])
    monkeypatch.setattr("edgellm_quantize.kquant_codec.load_library", lambda: library)
    for name in TYPES:
        for importance in (None, _importance(512)):
            twin = encode_rows(_hard_rows(), name, importance, "fast", native=False)
            native = encode_rows(_hard_rows(), name, importance, "fast", native=True)
            assert np.array_equal(twin.data, native.data), name


@pytest.mark.parametrize("name", TYPES)
def test_hard_rows_stay_finite_and_near(name: str) -> None:
    """E09: no NaN, zeros stay zeros, and what f16 scales reach is held as well as in easy rows."""
    rows = _hard_rows()
    decoded = _decoded(encode(rows, name), name)
    assert np.isfinite(decoded).all()
    assert not decoded[[0, 8]].any()
    bits = {"Q2_K": 0.6, "Q3_K": 0.4}.get(name, 0.2)
    for row in (1, 2, 4, 6, 9, 10, 11):
        error = np.linalg.norm(decoded[row] - rows[row]) / np.linalg.norm(rows[row])
        assert error < bits, row
    assert np.abs(decoded[13]).max() > 1e5, "the lone huge value is cut to the type's reach, not to zero"
    assert encode_rows(rows, name).clipped >= 1
    assert encode_rows(rows[:10], name).clipped == 0


def test_constant_rows_are_nearly_exact() -> None:
    for name in TYPES:
        rows = np.full((1, 256), 0.75, dtype=np.float32)
        assert np.allclose(_decoded(encode(rows, name), name), 0.75, rtol=2e-3), name


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K"])
def test_columns_can_be_rounded_one_by_one(name: str) -> None:
    """Error feedback's way: with unchanged columns it leads to the error of encode, bit for bit decodable."""
    grid = GRIDS[name]
    blocks = _rows(rows=12, width=grid.elements)
    importance = _importance(grid.elements)
    params = fit_blocks(blocks, name, importance)
    codes = np.zeros(blocks.shape, dtype=np.uint8)
    values = np.zeros_like(blocks)
    for column in range(grid.elements):
        codes[:, column], values[:, column] = round_column(blocks[:, column], params, column)
    data = pack(params, codes)
    assert np.array_equal(values.view(np.uint32), _decoded(data, name).view(np.uint32))
    whole = _decoded(encode(blocks, name, importance), name)
    error = (importance * (values - blocks) ** 2).sum()
    assert error == pytest.approx((importance * (whole - blocks) ** 2).sum(), rel=1e-4)


def test_importance_moves_the_error_to_unimportant_columns() -> None:
    rows, importance = _rows(width=1024), np.ones(1024, dtype=np.float32)
    importance[::4] = 100
    plain, weighted = (_decoded(encode(rows, "Q4_K", chosen), "Q4_K") for chosen in (None, importance))
    errors = [np.square(decoded - rows)[:, ::4].mean() for decoded in (plain, weighted)]
    assert errors[1] < 0.8 * errors[0]


def test_dead_columns_keep_a_share() -> None:
    """E17: zeros in an importance matrix must not let a column's weights become anything at all."""
    importance = np.zeros(512, dtype=np.float32)
    importance[:256] = 1
    assert normalized_importance(importance).min() > 0
    rows = _rows(width=512)
    decoded = _decoded(encode(rows, "Q4_K", importance), "Q4_K")
    assert np.square(decoded - rows)[:, 256:].mean() < 0.02
    assert np.array_equal(normalized_importance(np.zeros(8)), np.ones(8, np.float32))


def test_bad_input_is_refused() -> None:
    rows = _rows(rows=2, width=512)
    with pytest.raises(UsageError, match="rows of 480 weights"):
        encode(rows[:, :480], "Q4_K")
    for bad in (np.nan, np.inf):
        damaged = rows.copy()
        damaged[1, 7] = bad
        with pytest.raises(ValueError, match="not finite"):
            encode(damaged, "Q4_0")
        with pytest.raises(ValueError, match="finite and not negative"):
            encode(rows, "Q4_0", damaged[1])
    with pytest.raises(ValueError, match="importance of shape"):
        encode(rows, "Q4_0", np.ones(32, np.float32))

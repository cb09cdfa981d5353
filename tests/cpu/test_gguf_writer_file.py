"""The dense GGUF file itself: weights, heads, rotary tables, refusals, and a disk that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import edgellm_quantize.gguf_file as gguf_file
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import BadInputError, OutputError, UsageError
from edgellm_models.network import read_spec
from edgellm_models.network.spec import RopeSpec
from edgellm_quantize.gguf_metadata import llama3_divisors
from edgellm_quantize.gguf_source import interleave_rotary
from edgellm_quantize.writers import write_dense_gguf
from tests.support.oracles import require_oracle
from tests.support.tiny_models import ARCHITECTURES, make_tiny


def _gguf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors as gguf's own reader and decoder see them, f32."""
    import gguf

    reader = gguf.GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(size) for size in reversed(tensor.shape)]
        found[tensor.name] = torch.from_numpy(np.array(values)).reshape(shape).float()
    return found


def _source(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: values.float()
        for part in sorted(folder.glob("*.safetensors"))
        for name, values in load_file(part).items()
    }


def _write(folder: Path, dtype: str = "f32") -> Path:
    return write_dense_gguf(folder, folder.with_suffix(".gguf"), dtype).path


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "cast"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_weights_arrive_exactly(arch: str, dtype: str, cast: torch.dtype, tmp_path: Path) -> None:
    """D15 and the conversions: every tensor is there once, cast, moved or shifted as the format asks."""
    from edgellm_models.checkpoint.tensor_names import canonical_name

    biases = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    folder = make_tiny(arch, tmp_path / arch, shards=3, **biases)
    config = json.loads((folder / "config.json").read_text())
    written = _gguf_tensors(_write(folder, dtype))
    source = _source(folder)
    assert {canonical_name(arch, name) for name in source} == set(written)
    for name, values in source.items():
        expected = values
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        stem = name.split(".")[-2]
        if arch in ("llama", "mistral") and stem in heads:
            half = values.shape[0] // heads[stem] // 2
            rows = []
            for head in range(heads[stem]):
                for index in range(half):
                    start = head * 2 * half
                    rows += [start + index, start + half + index]
            expected = values[rows]
        if arch.startswith("gemma") and stem.endswith("norm"):
            expected = values + 1.0
        if values.ndim == 2:
            expected = expected.to(cast).float()
        found = written[canonical_name(arch, name) or ""]
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_both_forms_describe_the_same_model(arch: str, tmp_path: Path) -> None:
    """The spec of the file is the folder's, but for what the conversion itself changes."""
    folder = make_tiny(arch, tmp_path / arch, quantizable=True)
    specs = []
    for path in (folder, _write(folder)):
        checkpoint = open_checkpoint(path)
        specs.append(read_spec(checkpoint.file_format, checkpoint.metadata, checkpoint.tensors()))
        checkpoint.close()
    for name in (
        "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size",
        "context_length", "activation", "embedding_scale", "attention_softcap", "final_softcap", "qk_norm",
        "post_norms", "tied_embeddings",
    ):  # fmt: skip
        assert getattr(specs[0], name) == getattr(specs[1], name), name
    assert specs[0].rms_eps == pytest.approx(specs[1].rms_eps)
    assert specs[0].query_scale == pytest.approx(specs[1].query_scale)
    assert [layer.window for layer in specs[0].layers] == [layer.window for layer in specs[1].layers]
    bases = [[spec.ropes[layer.rope].base for layer in spec.layers] for spec in specs]
    assert bases[0] == bases[1]
    assert specs[1].norm_offset == 0.0
    assert specs[1].permuted_qk is (arch in ("llama", "mistral"))


def test_interleaving_is_by_head() -> None:
    """C13: [h0: a b | c d, h1: e f | g h] becomes a c b d, e g f h, for weights and biases."""
    rows = torch.arange(8.0)
    assert interleave_rotary(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(interleave_rotary(rows[:, None].expand(8, 3), 2)[:, 0], interleave_rotary(rows, 2))


def test_chunks_do_not_change_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that passes in many chunks has the bytes of one that passes whole, folded gains included."""
    folder = make_tiny("gemma2", tmp_path / "m", query_pre_attn_scalar=17)
    whole = _write(folder).read_bytes()
    monkeypatch.setattr("edgellm_quantize.gguf_source.CHUNK_WEIGHTS", 100)
    assert _write(folder).read_bytes() == whole


def test_an_odd_query_scale_is_folded_and_told(tmp_path: Path) -> None:
    """Loaders take 1/sqrt(head_dim): the weights carry the rest."""
    folder = make_tiny("gemma3", tmp_path / "m", query_pre_attn_scalar=8)
    report = write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert [notice.kind for notice in report.notices] == ["query_scale_folded"]
    gain = (32 / 8) ** 0.5
    source = _source(folder)["model.layers.0.self_attn.q_norm.weight"] + 1.0
    torch.testing.assert_close(_gguf_tensors(report.path)["blk.0.attn_q_norm.weight"], source * gain)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("stated", [True, False, None])
@pytest.mark.parametrize("head", ["present", "absent"])
def test_heads(arch: str, stated: bool | None, head: str, tmp_path: Path) -> None:
    """C11, D06: the config decides; a tied head is not written twice; a missing untied one is an error."""
    folder = make_tiny(arch, tmp_path / "m", tie_word_embeddings=bool(stated), head=head)
    config = json.loads((folder / "config.json").read_text())
    if stated is None:
        del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(config))
    if stated is False and head == "absent":
        with pytest.raises(BadInputError, match=r"lm_head\.weight"):
            write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
        return
    report = write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    tied = stated if stated is not None else arch == "gemma3" or head == "absent"
    assert ("output.weight" in _gguf_tensors(report.path)) is not tied
    assert ("tied_head_dropped" in [notice.kind for notice in report.notices]) is (tied and head == "present")


def test_llama3_divisors_equal_transformers() -> None:
    """D07: inverse frequencies equal transformers' to 1e-6."""
    require_oracle("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=scaling
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    rope = RopeSpec(
        base=500000.0, dims=128, scaling="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0,
        high_freq_factor=4.0,
    )  # fmt: skip
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ours = plain / torch.tensor(llama3_divisors(rope), dtype=torch.float64)
    torch.testing.assert_close(ours.float(), expected, rtol=1e-6, atol=0)
    assert len(set(llama3_divisors(rope))) > 3


@pytest.mark.parametrize(
    ("arch", "overrides", "kinds"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling_dropped"]),
        (
            "llama",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 16,
                }
            },
            ["yarn_betas_ignored"],
        ),
        ("mistral", {"sliding_window": 8}, ["sliding_window_ignored"]),
        ("mistral", {"sliding_window": 4096}, []),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            ["sliding_window_ignored"],
        ),
        ("phi3", {"sliding_window": 8}, ["sliding_window_ignored"]),
    ],
)
def test_what_gguf_cannot_do_is_told(
    arch: str, overrides: dict[str, Any], kinds: list[str], tmp_path: Path
) -> None:
    folder = make_tiny(arch, tmp_path / "m", **overrides)
    report = write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert [notice.kind for notice in report.notices] == kinds


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False}


@pytest.mark.parametrize(
    ("arch", "overrides", "words"),
    [
        ("qwen3", {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 64}}, "llama3"),
        ("llama", {"rope_scaling": {**_YARN, "original_max_position_embeddings": 64}}, "truncate"),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "activation"),
    ],
)
def test_what_gguf_cannot_say_is_refused(
    arch: str, overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = make_tiny(arch, tmp_path / "m", **overrides)
    with pytest.raises(BadInputError, match=words):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert os.listdir(tmp_path) == ["m"]


def _spoil(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][place] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_weight_is_named(value: float, tmp_path: Path) -> None:
    """E20: tensor and index, and no file."""
    folder = make_tiny("llama", tmp_path / "m")
    _spoil(folder, "model.layers.1.mlp.down_proj.weight", (5, 7), value)
    with pytest.raises(BadInputError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .*\[5, 7\]"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert os.listdir(tmp_path) == ["m"]


def test_f16_overflow_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    _spoil(folder, "lm_head.weight", (0, 0), 70000.0)
    with pytest.raises(BadInputError, match=r"70000.*bf16 or f32"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f16")
    write_dense_gguf(folder, tmp_path / "m.gguf", "bf16")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """E16: --out no/such/dir/m.gguf."""
    folder = make_tiny("llama", tmp_path / "m")
    with pytest.raises(OutputError, match=r"no/such/dir does not exist"):
        write_dense_gguf(folder, tmp_path / "no/such/dir/m.gguf", "f32")
    with pytest.raises(OutputError, match="folder"):
        write_dense_gguf(folder, tmp_path, "f32")


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E16: needed and free bytes are named."""
    folder = make_tiny("llama", tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 16)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"no space.*65,536 are free"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("fault", "raised", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutputError, "no space left"),
        (OSError(errno.EROFS, "Read-only file system"), OutputError, "not permitted"),
        (OSError(errno.EIO, "Input/output error"), OutputError, "Input/output error"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_fault_half_way_leaves_nothing(
    fault: BaseException,
    raised: type[BaseException],
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E16: no file under the final name, no temporary one, and an older file stays as it was."""
    folder = make_tiny("llama", tmp_path / "m")
    out = tmp_path / "m.gguf"
    out.write_bytes(b"older")
    write, calls = gguf_file._pad, []

    def fail(stream: Any) -> None:
        calls.append(stream.tell())
        if len(calls) == 5:
            assert len(list(tmp_path.glob(".m.gguf*.partial"))) == 1
            raise fault
        write(stream)

    monkeypatch.setattr(gguf_file, "_pad", fail)
    with pytest.raises(raised, match=words):
        write_dense_gguf(folder, out, "f32")
    assert len(calls) == 5
    assert sorted(os.listdir(tmp_path)) == ["m", "m.gguf"]
    assert out.read_bytes() == b"older"


def test_a_real_write_error_leaves_nothing(tmp_path: Path) -> None:
    """E16 with the kernel refusing bytes: a file size limit stands for the full disk."""
    folder = make_tiny("llama", tmp_path / "m")
    program = f"""
        import resource, signal, sys
        sys.path[:0] = {[path for path in sys.path if path]!r}
        from pathlib import Path
        from edgellm_models.errors import OutputError
        from edgellm_quantize.writers import write_dense_gguf
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            write_dense_gguf(Path({str(folder)!r}), Path({str(tmp_path / "m.gguf")!r}), "f32")
        except OutputError as error:
            print(error)
            raise SystemExit(error.exit_code)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 73, done.stderr
    assert "too large" in done.stdout.lower()
    assert os.listdir(tmp_path) == ["m"]


def test_a_disk_that_changes_bytes_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read-back compares every tensor, so a flipped bit keeps the file from its name."""
    folder = make_tiny("llama", tmp_path / "m")
    original = gguf_file._read_back

    def flip(partial: Path, *rest: Any) -> None:
        data = bytearray(partial.read_bytes())
        data[-100] ^= 1
        partial.write_bytes(data)
        original(partial, *rest)

    monkeypatch.setattr(gguf_file, "_read_back", flip)
    with pytest.raises(OutputError, match="does not read back"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    assert os.listdir(tmp_path) == ["m"]


def test_an_unknown_dtype_or_a_gguf_source_is_a_clear_error(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    with pytest.raises(UsageError, match=r"f8.*f32, f16, bf16"):
        write_dense_gguf(folder, tmp_path / "m.gguf", "f8")
    write_dense_gguf(folder, tmp_path / "m.gguf", "f32")
    with pytest.raises(BadInputError, match="folder"):
        write_dense_gguf(tmp_path / "m.gguf", tmp_path / "n.gguf", "f32")


def test_sources_in_half_precision_and_shards(tmp_path: Path) -> None:
    """bf16 and f16 folders become f32 files with the same values; shards become one file."""
    for dtype in ("bf16", "f16"):
        folder = make_tiny("qwen3", tmp_path / dtype, dtype=dtype, shards=4)
        assert len(list(folder.glob("*.safetensors"))) == 4
        written = _gguf_tensors(_write(folder))
        source = _source(folder)
        assert torch.equal(written["blk.1.ffn_up.weight"], source["model.layers.1.mlp.up_proj.weight"])
        assert torch.equal(
            written["blk.0.attn_q_norm.weight"], source["model.layers.0.self_attn.q_norm.weight"]
        )

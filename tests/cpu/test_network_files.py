"""From files to a decoder: GGUF row orders, missing tensors, shapes, ties, forms of holding, notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgellm_kernels.weights import BlockLayout, BlockQuantWeight, DenseWeight, StackedWeight
from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.reader import Checkpoint, TensorInfo
from edgellm_models.errors import BadInputError, ResourceError
from edgellm_models.network import build as build_module
from edgellm_models.network.build import build_decoder
from edgellm_models.network.decoder import Decoder
from edgellm_models.network.hold import choose_hold, free_memory_bytes
from tests.support.paged import PagedRun, relative_error, run_whole
from tests.support.tiny_models import ARCHITECTURES, make_tiny, tiny_gguf
from tests.support.transformers_oracle import greedy, transformers_logits, transformers_model

TOLERANCE = 1e-4


def prompt(decoder: Decoder, length: int = 40) -> list[int]:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, decoder.spec.vocab_size, (length,), generator=rng).tolist()


class Edited:
    """A checkpoint with some tensors changed, added or hidden, over a real reader."""

    def __init__(
        self,
        inner: Checkpoint,
        *,
        hidden: tuple[str, ...] = (),
        infos: Mapping[str, TensorInfo] | None = None,
        metadata: Mapping[str, Any] | None = None,
        weights: Callable[[str, DenseWeight | BlockQuantWeight], DenseWeight | BlockQuantWeight]
        | None = None,
    ) -> None:
        self._inner = inner
        self._infos = {k: v for k, v in inner.tensors().items() if k not in hidden} | dict(infos or {})
        self._weights = weights
        self.path, self.file_format = inner.path, inner.file_format
        self.architecture, self.notices = inner.architecture, inner.notices
        self.metadata = dict(inner.metadata) | dict(metadata or {})
        self.file_bytes = inner.file_bytes

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def has(self, name: str) -> bool:
        return name in self._infos

    def weight(self, name: str) -> DenseWeight | BlockQuantWeight:
        weight = self._inner.weight(name)
        return weight if self._weights is None else self._weights(name, weight)

    def vector(self, name: str) -> torch.Tensor:
        return self._inner.vector(name)

    def release_pages(self) -> None:
        self._inner.release_pages()

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders by (family, options), each made once."""
    made: dict[str, Path] = {}

    def get(arch: str, **options: Any) -> Path:
        key = arch + json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = make_tiny(arch, tmp_path_factory.mktemp(arch), **options)
        return made[key]

    return get


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_files(tiny: Callable[..., Path], tmp_path: Path, arch: str, heads: tuple[int, int]) -> None:
    """C13: q has its own head count and k has its own; families without the permutation are left alone."""
    folder = tiny(arch, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    decoder = build_decoder(open_checkpoint(tiny_gguf(folder, tmp_path / "model.gguf")))
    assert decoder.spec.permuted_qk is (arch in ("llama", "mistral"))
    ids = prompt(decoder)
    oracle = transformers_model(folder)
    assert relative_error(run_whole(decoder, ids), transformers_logits(oracle, ids)) < TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_files_of_quantizable_models(tiny: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """C13: the models that block types are tried on are right before they are quantized."""
    folder = tiny(arch, quantizable=True)
    decoder = build_decoder(open_checkpoint(tiny_gguf(folder, tmp_path / "model.gguf", "f32")))
    ids = prompt(decoder)
    expected = transformers_logits(transformers_model(folder), ids)
    assert relative_error(run_whole(decoder, ids), expected) < TOLERANCE


def test_gguf_greedy(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """C13: fifty greedy tokens, where a wrong row order would show late."""
    folder = tiny("llama", num_attention_heads=8, num_key_value_heads=2)
    decoder = build_decoder(open_checkpoint(tiny_gguf(folder, tmp_path / "model.gguf")))
    ids = prompt(decoder, 5)
    expected, ties = greedy(transformers_model(folder), ids, 50)
    assert not any(ties)
    run = PagedRun(decoder)
    logits = run.step([("a", ids)])[0]
    got = []
    for _ in range(50):
        got.append(int(logits[-1].argmax()))
        logits = run.step([("a", got[-1:])])[0]
    assert got == expected


def test_gguf_biases_are_permuted_too(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """C13, D15: a q or k bias lies in the order of its weight's rows."""
    folder = tiny("llama", attention_bias=True, mlp_bias=True, num_attention_heads=8)
    decoder = build_decoder(open_checkpoint(tiny_gguf(folder, tmp_path / "model.gguf")))
    ids = prompt(decoder)
    expected = transformers_logits(transformers_model(folder), ids)
    assert relative_error(run_whole(decoder, ids), expected) < TOLERANCE


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3"])
@pytest.mark.parametrize("hold", ["dense", "blocks"])
def test_block_weights(tiny: Callable[..., Path], tmp_path: Path, arch: str, hold: str) -> None:
    """Mixed block types in one file, rows moved while packed: as the decoded weights in a dense file."""
    folder = tiny(arch, quantizable=True)
    path = tiny_gguf(folder, tmp_path / "model.gguf")
    types = ("Q8_0", "Q4_0", "Q5_1", "Q8_0")

    def quantized(name: str, weight: DenseWeight | BlockQuantWeight) -> BlockQuantWeight:
        import gguf

        assert isinstance(weight, DenseWeight)
        kind = types[len(name) % len(types)]
        data = gguf.quants.quantize(weight.data.numpy(), gguf.GGMLQuantizationType[kind])
        return BlockQuantWeight(torch.from_numpy(data), BlockLayout[kind], weight.shape[1])

    def decoded(name: str, weight: DenseWeight | BlockQuantWeight) -> DenseWeight:
        from edgellm_kernels.ggml_blocks import dequantize

        block = quantized(name, weight)
        return DenseWeight(dequantize(block.data, block.layout, block.in_features))

    checkpoint = open_checkpoint(path)
    blocks = build_decoder(Edited(checkpoint, weights=quantized), hold=hold)
    dense = build_decoder(Edited(checkpoint, weights=decoded), hold="dense")
    ids = prompt(blocks)
    assert relative_error(run_whole(blocks, ids), run_whole(dense, ids)) < 1e-5
    qkv = blocks.weights.layers[0].qkv
    if hold == "blocks":
        assert blocks.weight_bytes < dense.weight_bytes / 2
        assert isinstance(qkv, StackedWeight | BlockQuantWeight)
    else:
        assert isinstance(qkv, DenseWeight)
        # Of an untied table only the looked-up rows are decoded.
        saved = 0 if arch == "gemma3" else dense.weights.embedding.nbytes - blocks.weights.embedding.nbytes
        assert blocks.weight_bytes == dense.weight_bytes - saved and (saved > 0) is (arch != "gemma3")


def test_one_memory_for_a_tied_table(tiny: Callable[..., Path]) -> None:
    """The head of a tied model is the embedding's very memory and counts once."""
    for hold in ("dense", "blocks"):
        decoder = build_decoder(open_checkpoint(tiny("gemma3")), hold=hold)
        table, head = decoder.weights.embedding, decoder.weights.head
        assert isinstance(head, DenseWeight) and head.data.data_ptr() == table.data.data_ptr()
        total = sum(t.nbytes for t in open_checkpoint(tiny("gemma3")).tensors().values())
        assert decoder.weight_bytes == total


@pytest.mark.parametrize("arch", ["gemma3", "qwen2", "llama"])
@pytest.mark.parametrize("head", ["absent", "present"])
def test_gguf_head(tmp_path: Path, arch: str, head: str) -> None:
    """C11: a GGUF without output.weight uses the embedding; one with it uses it."""
    folder = make_tiny(arch, tmp_path / "hf", tie_word_embeddings=head == "absent")
    decoder = build_decoder(open_checkpoint(tiny_gguf(folder, tmp_path / "model.gguf")))
    assert decoder.spec.tied_embeddings is (head == "absent")
    ids = prompt(decoder)
    expected = transformers_logits(transformers_model(folder), ids)
    assert relative_error(run_whole(decoder, ids), expected) < TOLERANCE


def test_a_second_copy_of_a_tied_head(tiny: Callable[..., Path]) -> None:
    """D06: when the config says tied the embedding is used, and the unused head is mentioned."""
    decoder = build_decoder(open_checkpoint(tiny("qwen2", tie_word_embeddings=True, head="present")))
    assert decoder.weights.head is decoder.weights.embedding
    assert [n.kind for n in decoder.notices] == ["tied_head_ignored", "weight_form"]


def test_an_untied_model_without_its_head(tiny: Callable[..., Path]) -> None:
    """D06: the config says untied and there is no head."""
    folder = tiny("qwen2", tie_word_embeddings=False, head="absent")
    with pytest.raises(BadInputError, match=r"output\.weight \(lm_head\.weight\) is missing"):
        build_decoder(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "blk.0.ffn_norm.weight", "output_norm.weight"])
def test_missing_tensors_are_named(tiny: Callable[..., Path], name: str) -> None:
    """C05"""
    checkpoint = Edited(open_checkpoint(tiny("llama")), hidden=(name,))
    with pytest.raises(BadInputError, match=f"tensor {name} is missing"):
        build_decoder(checkpoint)


def test_a_missing_bias_is_named(tiny: Callable[..., Path]) -> None:
    """D15: a family or config that has biases does not run without them."""
    checkpoint = Edited(open_checkpoint(tiny("qwen2")), hidden=("blk.1.attn_v.bias",))
    with pytest.raises(BadInputError, match=r"tensor blk\.1\.attn_v\.bias is missing"):
        build_decoder(checkpoint)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"head_dim": 32}, r"blk\.0\.attn_q\.weight has the shape \[64, 64\].*\[128, 64\]"),
        ({"num_key_value_heads": 4}, r"blk\.0\.attn_k\.weight"),
        ({"intermediate_size": 96}, r"blk\.0\.ffn_gate\.weight"),
        ({"hidden_size": 32, "head_dim": 16}, r"token_embd\.weight"),
        ({"num_hidden_layers": 3}, r"blk\.2\.attn_norm\.weight is missing"),
    ],
)
def test_sizes_unlike_the_tensors(tiny: Callable[..., Path], metadata: dict[str, Any], named: str) -> None:
    """C05: what the metadata says is checked against every tensor before one is read."""
    checkpoint = Edited(open_checkpoint(tiny("llama")), metadata=metadata)
    with pytest.raises(BadInputError, match=named):
        build_decoder(checkpoint)


def test_unknown_tensors_are_a_notice(tiny: Callable[..., Path]) -> None:
    """C05: extra tensors are mentioned and do no harm."""
    checkpoint = open_checkpoint(tiny("llama"))
    info = checkpoint.tensors()["output_norm.weight"]
    extra = {
        name: replace(info, name=name)
        for name in ("blk.0.magic.weight", "model.layers.0.rotary_emb.inv_freq")
    }
    decoder = build_decoder(Edited(checkpoint, infos=extra))
    (notice,) = [n for n in decoder.notices if n.kind == "tensors_ignored"]
    assert "1 tensors" in notice.detail and "blk.0.magic.weight" in notice.detail


def test_a_class_name_stands_in_for_model_type(tmp_path: Path) -> None:
    """Not only the reader accepts such a folder: it runs, as the one that names its type."""
    folder = make_tiny("qwen2", tmp_path / "m")
    named = build_decoder(open_checkpoint(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    decoder = build_decoder(open_checkpoint(folder))
    ids = prompt(decoder, 12)
    assert torch.equal(run_whole(decoder, ids), run_whole(named, ids))


def test_factor_tables(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """D07: Llama 3 and longrope scaling from a GGUF's tensors, against transformers on the folder."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    long = {"type": "longrope", "long_factor": [2.0] * 6, "short_factor": [1.1] * 6}
    folders = [
        tiny("llama", rope_scaling=rope),
        tiny(
            "phi3",
            rope_scaling=long,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=32,
            max_position_embeddings=256,
        ),
    ]
    for folder in folders:
        decoder = build_decoder(open_checkpoint(tiny_gguf(folder, tmp_path / f"{folder.name}.gguf")))
        oracle = transformers_model(folder)
        for length in (20, 60):
            ids = prompt(decoder, length)
            assert relative_error(run_whole(decoder, ids), transformers_logits(oracle, ids)) < TOLERANCE


def test_auto_holds_blocks_when_memory_is_short(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny("llama"))
    needed = build_decoder(checkpoint, kernels="torch").weight_bytes
    for free, kind in ((needed, "blocks"), (needed * 2, "dense"), (None, "dense")):
        monkeypatch.setattr(build_module, "free_memory_bytes", lambda free=free: free)
        decoder = build_decoder(checkpoint, kernels="torch")
        kinds = [n.kind for n in decoder.notices]
        assert ("weights_kept_as_blocks" in kinds) is (kind == "blocks")
        assert isinstance(decoder.weights.layers[0].qkv, StackedWeight if kind == "blocks" else DenseWeight)
    assert "weights_kept_as_blocks" not in [n.kind for n in build_decoder(checkpoint, hold="blocks").notices]


def test_choose_hold() -> None:
    assert choose_hold("dense", 10, 1) == "dense" and choose_hold("blocks", 1, 10) == "blocks"
    assert choose_hold("auto", 70, 100) == "dense" and choose_hold("auto", 71, 100) == "blocks"
    free = free_memory_bytes()
    assert free is None or free > 1 << 20


def test_allocation_failure_is_one_clear_line(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(build_module, "prepare", fail)
    with pytest.raises(ResourceError, match=r"not enough memory for the weights \(0\.0 GB"):
        build_decoder(open_checkpoint(tiny("llama")))


def test_kernels_that_are_not_there(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ResourceError, match="no triton kernels"):
        build_decoder(open_checkpoint(tiny("llama")), kernels="triton")


def test_bf16_computation_is_near(tiny: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny("llama"))
    exact, near = build_decoder(checkpoint), build_decoder(checkpoint, dtype=torch.bfloat16)
    ids = prompt(exact, 12)
    logits = run_whole(near, ids)
    assert logits.dtype == torch.float32
    assert relative_error(logits, run_whole(exact, ids)) < 0.2
    assert near.weights.layers[0].qkv.nbytes * 2 == exact.weights.layers[0].qkv.nbytes


def test_the_number_of_groups_is_checked(tiny: Callable[..., Path]) -> None:
    decoder = build_decoder(open_checkpoint(tiny("gemma3")))
    run = PagedRun(decoder)
    run.storages.pop()
    with pytest.raises(ValueError, match="2 KV groups"):
        run.step([("a", [1, 2])])

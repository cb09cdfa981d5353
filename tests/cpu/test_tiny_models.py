"""The fixtures that other tests stand on: transformers loads them, margins are wide, scripts are followed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bigram import bigram_gguf, make_bigram, sentencepiece_model
from tests.support.oracles import TransformersModel
from tests.support.tiny_models import ARCHITECTURES, make_tiny, tiny_gguf


@pytest.mark.parametrize("quantizable", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_a_tiny_model_whole(arch: str, quantizable: bool, tmp_path: Path) -> None:
    """No missing and no surplus weights, logits of the promised spread, answers that are not one token."""
    folder = make_tiny(arch, tmp_path / arch, quantizable=quantizable)
    reference = TransformersModel(folder)
    assert not reference.loading["missing_keys"] and not reference.loading["unexpected_keys"]
    answer = reference.greedy(reference.encode("The keeper of the light counted 7 ships."), 32)
    assert 5.0 < answer.logits.std().item() < 20.0
    assert len(set(answer.token_ids)) > 8
    best = answer.logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median().item() > 0.5
    if quantizable:
        for name, values in reference.model.state_dict().items():
            if values.ndim == 2:
                assert values.shape[1] % 256 == 0, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_matters(arch: str, tmp_path: Path) -> None:
    """A fixture whose answer hangs on the last token alone would hide every fault of a cache."""
    reference = TransformersModel(make_tiny(arch, tmp_path / arch))
    ids = reference.encode("The keeper of the light counted 7 ships that morning, seven more in the evening.")
    changed = []
    for distance in range(1, 13):  # inside the window of the Gemma fixtures
        row = list(ids)
        row[-1 - distance] = ids[-1]
        changed.append(row)
    with torch.no_grad():
        logits = reference.model(torch.tensor([ids, *changed])).logits[:, -1]
    effects = (logits[1:] - logits[0]).abs().amax(dim=1)
    assert effects.max().item() > 5.0 and effects.median().item() > 0.1, effects


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_tiny_model_is_made_quickly_and_the_same(arch: str, tmp_path: Path) -> None:
    make_tiny(arch, tmp_path / "warm")
    start = time.process_time()
    one, two = make_tiny(arch, tmp_path / "one"), make_tiny(arch, tmp_path / "two")
    assert time.process_time() - start < 2.0
    names = sorted(path.name for path in one.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} < set(names)
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_overrides_reach_config_and_weights(tmp_path: Path) -> None:
    folder = make_tiny(
        "llama",
        tmp_path / "m",
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=None,
        vocab_size=500,
        attention_bias=True,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        tie_word_embeddings=True,
        dtype="bf16",
    )
    state = TransformersModel(folder).model.state_dict()
    assert state["model.layers.0.self_attn.k_proj.weight"].shape == (8, 64)
    assert state["model.layers.0.self_attn.o_proj.bias"].shape == (64,)
    assert state["model.embed_tokens.weight"].shape == (500, 64)
    config = json.loads((folder / "config.json").read_text())
    assert config["head_dim"] is None and config["rope_scaling"]["factor"] == 2.0
    with pytest.raises(ValueError, match="phi3"):
        make_tiny("mamba", tmp_path / "n")


def test_one_override_leaves_other_weights_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = load_file(make_tiny("llama", tmp_path / "a") / "model.safetensors")
    biased = load_file(make_tiny("llama", tmp_path / "b", attention_bias=True) / "model.safetensors")
    other = load_file(make_tiny("llama", tmp_path / "c", seed=1) / "model.safetensors")
    assert all(torch.equal(values, biased[name]) for name, values in plain.items())
    assert len(biased) == len(plain) + 8
    assert not any(torch.equal(values, other[name]) for name, values in plain.items())


def test_shards_and_heads(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "s", shards=3, tie_word_embeddings=True, head="present")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3 and "lm_head.weight" in index["weight_map"]
    assert not TransformersModel(folder).loading["missing_keys"]


BPE_CHAIN = ["Hello", " world", b"\xf0\x9f", b"\x98\x80", " <to", "ol_", "call>", "<tool>", "\n\n", "it's"]
SPM_CHAIN = [" Hello", " world", b"\xf0", b"\x9f", b"\x98", b"\x80", " <to", "ol_", "<tool>", "\n", "it's"]


@pytest.mark.parametrize(("tokenizer", "chain"), [("bpe", BPE_CHAIN), ("spm", SPM_CHAIN)])
@pytest.mark.parametrize("loop", [False, True])
def test_a_scripted_model_follows_its_chain(
    tokenizer: str, chain: list[Any], loop: bool, tmp_path: Path
) -> None:
    """The logit of the next piece is 20 and all others are 0."""
    folder = make_bigram(
        tmp_path / "m", chain, added=["<tool>"], tokenizer=tokenizer, loop=loop, dead_layers=2
    )
    reference = TransformersModel(folder)
    assert reference.model.config.num_hidden_layers == 3
    text = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in chain).decode()
    for prompt in ("go", "Why?\n Because", "x <tool"):
        answer = reference.greedy(reference.encode(prompt), 2 * len(chain))
        best = answer.logits.topk(2).values
        torch.testing.assert_close(best[:, 0], torch.full((2 * len(chain),), 20.0))
        assert best[:, 1].abs().max().item() < 1e-6
        ids = answer.token_ids
        assert len(set(ids[: len(chain)])) == len(chain)
        decoded = reference.tokenizer.decode(ids[: len(chain)], skip_special_tokens=False)
        assert decoded.lstrip(" ") == text.lstrip(" ")
        if loop:
            assert ids[: len(chain)] == ids[len(chain) :]
        else:
            assert reference.tokenizer.decode(ids[len(chain)]) == "</s>"
            assert ids[len(chain) + 1 :] == ids[: len(chain) - 1]


def test_a_prompt_that_ends_in_a_chain_goes_on_there(tmp_path: Path) -> None:
    folder = make_bigram(
        tmp_path / "m", ["A", "B"], special=["<|go|>"], more_chains=[["<|go|>", "x", "y"]], chat_template="T"
    )
    reference = TransformersModel(folder)
    assert reference.tokenizer.decode(reference.greedy(reference.encode("k A"), 2).token_ids) == "B</s>"
    assert reference.tokenizer.decode(reference.greedy(reference.encode("k<|go|>"), 3).token_ids) == "xy</s>"
    assert reference.tokenizer.chat_template == "T"


def test_an_end_token_that_only_generation_config_names(tmp_path: Path) -> None:
    """D11's fixture: the second token is an end id, and the chain goes on behind it."""
    folder = make_bigram(
        tmp_path / "m", ["a", "<|end|>", "b"], special=["<|end|>"], generation_eos=["<|end|>"]
    )
    reference = TransformersModel(folder)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    ids = reference.greedy(reference.encode("go"), 4).token_ids
    assert len(ends) == 2 and ids[1] == ends[1] and ids[3] == ends[0]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == ends[0]


def test_long_chains_stay_small(tmp_path: Path) -> None:
    chain = [f" {index * 7919 % 1000:03d}{index} word" for index in range(300)]
    large = make_bigram(tmp_path / "a", chain)
    small = make_bigram(tmp_path / "b", chain, encodable=False)
    sizes = [json.loads((folder / "config.json").read_text())["hidden_size"] for folder in (large, small)]
    assert sizes[1] == 576 < sizes[0]


def test_mistakes_of_a_script_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="visits a token once"):
        make_bigram(tmp_path / "a", ["x", "y", b"x"])
    with pytest.raises(ValueError, match="empty"):
        make_bigram(tmp_path / "b", [])
    with pytest.raises(ValueError, match="single bytes"):
        make_bigram(tmp_path / "c", [b"\xf0\x9f"], tokenizer="spm")


def test_a_handmade_sentencepiece_model_is_one() -> None:
    import sentencepiece

    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<tag>", 0.0, 4), ("▁a", -1.0, 1)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(pieces))
    assert processor.encode("a<tag>", out_type=str) == ["▁a", "<tag>"]
    assert processor.is_byte(5) and processor.is_control(1) and processor.is_unknown(0)


def test_both_fixtures_have_a_gguf_form(tmp_path: Path) -> None:
    import gguf

    for path in (
        tiny_gguf(make_tiny("llama", tmp_path / "t"), tmp_path / "t.gguf", "f16"),
        bigram_gguf(make_bigram(tmp_path / "b", ["x"]), tmp_path / "b.gguf"),
    ):
        reader = gguf.GGUFReader(path)
        assert reader.fields["general.architecture"].contents() == "llama"
        assert {tensor.name for tensor in reader.tensors} >= {"token_embd.weight", "output.weight"}

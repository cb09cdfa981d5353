"""One list of families: what the readers accept the network accepts too, in the same words."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from edgellm_models.architectures import FAMILIES, GGUF_ARCHITECTURES, gguf_architecture, hf_architecture
from edgellm_models.errors import BadInputError
from edgellm_models.network import read_spec

MODELS = Path(__file__).resolve().parents[2] / "models" / "edgellm_models"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NAMES: list[tuple[dict[str, Any], str | None]] = [
    *(({"model_type": family}, family) for family in FAMILIES),
    ({"model_type": "gemma3_text"}, "gemma3"),
    ({"model_type": "gemma3", "text_config": {**SIZES, "model_type": "gemma3_text"}}, "gemma3"),
    ({"model_type": "gemma3", "text_config": SIZES}, "gemma3"),
    ({"architectures": ["Qwen2ForCausalLM"]}, "qwen2"),
    ({"model_type": "", "architectures": ["Phi3ForCausalLM"]}, "phi3"),
    ({"model_type": None, "architectures": ["LlamaForCausalLM"]}, "llama"),
    ({"model_type": "mamba9", "architectures": ["LlamaForCausalLM"]}, None),
    ({"model_type": "t5", "text_config": {"model_type": "llama"}}, None),
    ({"model_type": "gemma3", "text_config": {"model_type": "t5"}}, None),
    ({"architectures": []}, None),
    ({"model_type": 7}, None),
    ({}, None),
]


@pytest.mark.parametrize(("config", "family"), NAMES, ids=str)
def test_reader_and_network_agree_on_configs(config: dict[str, Any], family: str | None) -> None:
    whole = {**SIZES, **config}
    if family is not None:
        assert hf_architecture(whole, "config.json") == family
        assert read_spec("safetensors", whole, {}).architecture == family
        return
    with pytest.raises(BadInputError) as ours:
        hf_architecture(whole, "config.json")
    with pytest.raises(BadInputError) as theirs:
        read_spec("safetensors", whole, {})
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("architecture", [*FAMILIES, "mamba9", "clip", "", 7])
def test_reader_and_network_agree_on_gguf_files(architecture: str | int) -> None:
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 6,
        f"{architecture}.context_length": 2048,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 128,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": ["a"] * 50,
    }
    if architecture in GGUF_ARCHITECTURES:
        assert gguf_architecture(metadata, "the file") == architecture
        assert read_spec("gguf", metadata, {}).architecture == architecture
        return
    with pytest.raises(BadInputError) as ours:
        gguf_architecture(metadata, "the file")
    with pytest.raises(BadInputError) as theirs:
        read_spec("gguf", metadata, {})
    assert str(theirs.value) == str(ours.value)


def test_no_other_file_lists_the_families() -> None:
    """Literal lists and sets; tables that say something of each family are keyed by it, which is checked by
    the tests above."""
    found = []
    for path in sorted(MODELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                values = {item.value for item in node.elts if isinstance(item, ast.Constant)}
                if set(GGUF_ARCHITECTURES) <= values:
                    found.append(path.relative_to(MODELS).as_posix())
    assert found == ["architectures.py"]

"""How the fixtures' tokenizers differ by family: split patterns, special tokens, chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The pre-tokenizer patterns as the families publish them in tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class BPEStyle:
    """A byte-level BPE family: how it splits and which tokens it adds after the trained vocabulary."""

    pattern: str | None
    """Split pattern; None is ByteLevel's own GPT-2 splitting."""
    special: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str | None
    eot: str | None = None
    """A second end token, listed in generation_config."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    digits: bool = False
    """Split off single digits first, as SmolLM does."""
    add_bos: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    special_first: bool = False
    tokenizer_class: str = "PreTrainedTokenizerFast"
    chat_template: str | None = None


BPE_STYLES: Mapping[str, BPEStyle] = {
    "llama3": BPEStyle(
        LLAMA3_PATTERN,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|finetune_right_pad_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        pad="<|finetune_right_pad_id|>",
        eot="<|eot_id|>",
        add_bos=True,
        ignore_merges=True,
        chat_template=_LLAMA3,
    ),
    "qwen2": BPEStyle(
        QWEN2_PATTERN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        eot="<|endoftext|>",
        added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        nfc=True,
        tokenizer_class="Qwen2Tokenizer",
        chat_template=_CHATML,
    ),
    "nemo": BPEStyle(
        TEKKEN_PATTERN,
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        add_bos=True,
        ignore_merges=True,
        special_first=True,
        chat_template=_MISTRAL,
    ),
    "phi4": BPEStyle(
        GPT4O_PATTERN,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        eot="<|end|>",
        added=("<|tool_call|>", "<|/tool_call|>"),
        chat_template=_PHI3,
    ),
    "smollm": BPEStyle(
        None,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        digits=True,
        special_first=True,
        chat_template=_CHATML,
    ),
    "gpt2": BPEStyle(
        None, ("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>", pad=None, chat_template=None
    ),
}


@dataclass(frozen=True)
class SPMStyle:
    """A SentencePiece family."""

    ids: Mapping[str, int]
    """unk, bos, eos and pad (-1: none) ids."""
    bos: str = "<s>"
    eos: str = "</s>"
    pad: str | None = None
    dummy_prefix: bool = True
    user_defined: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    added_special: tuple[str, ...] = ()
    """Added tokens beyond tokenizer.model, as Phi-3 has them."""
    rstrip: tuple[str, ...] = ()
    """Tokens that swallow the white space after them."""
    eot: str | None = None
    add_bos: bool = True
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """transformers 5 rebuilds LlamaTokenizer's splitting; this class takes tokenizer.json as it is."""
    chat_template: str | None = None


SPM_STYLES: Mapping[str, SPMStyle] = {
    "spm_llama": SPMStyle({"unk": 0, "bos": 1, "eos": 2, "pad": -1}, chat_template=_MISTRAL),
    "spm_mistral": SPMStyle(
        {"unk": 0, "bos": 1, "eos": 2, "pad": -1}, control=("[INST]", "[/INST]"), chat_template=_MISTRAL
    ),
    "spm_gemma": SPMStyle(
        {"unk": 3, "bos": 2, "eos": 1, "pad": 0},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        dummy_prefix=False,
        user_defined=("<start_of_turn>", "<end_of_turn>", "<unused0>", "<unused1>"),
        eot="<end_of_turn>",
        tokenizer_class="GemmaTokenizer",
        chat_template=_GEMMA,
    ),
    "spm_phi3": SPMStyle(
        {"unk": 0, "bos": 1, "eos": 2, "pad": -1},
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        added_special=("<|endoftext|>", "<|assistant|>", "<|end|>", "<|system|>", "<|user|>"),
        rstrip=("</s>", "<|assistant|>", "<|end|>", "<|system|>", "<|user|>"),
        eot="<|end|>",
        add_bos=False,
        chat_template=_PHI3,
    ),
}

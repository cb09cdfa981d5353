"""Calibration text as token ids: from a file or written by the model, seeded, with BOS and templates."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import BadInputError, NotFoundError, Notice, UsageError
from edgellm_quantize.recipe import CalibrationSpec, Generate

if TYPE_CHECKING:
    from edgellm_models.tokenizer.base import Tokenizer
    from edgellm_models.tokenizer.chat_template import ChatTemplates

MIN_TOKENS = 128
"""Fewer show nothing of a model's inputs."""
FEW_TOKENS = 16_384
"""Below this a notice says that more would help."""
MAX_FILE_BYTES = 256 << 20
_SHORTEST = 8
"""Tokens of a sequence that is worth a place."""
_ROUNDS = 8
_REQUESTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that merges two sorted lists, and explain it line by line.",
    "Summarize the causes of the First World War for a school class.",
    "Schreibe einen kurzen Brief an eine Freundin über deinen Urlaub.",
    "¿Cuáles son las ventajas de aprender un segundo idioma?",
    "Expliquez la photosynthèse à un enfant de dix ans.",
    "List ten ideas for a rainy afternoon, each with one sentence.",
    "Solve step by step: a train covers 180 km in 2.5 hours. How fast is it?",
    "Give me a recipe for vegetable soup with quantities.",
    "Translate into French, Spanish and German: The meeting has been moved to Thursday.",
    "Write a SQL query that finds the three best customers of each month.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite e-mail that declines an invitation.",
    "Describe the water cycle as a table with two columns.",
    "Compare TCP and UDP.",
    "Write a dialogue between a doctor and a patient about sleep.",
    "Write an HTML page with a form that asks for a name and an address, as JSON and as markup.",
    "用简单的话解释什么是机器学习。",
    "Write a review of a book that you like, with its strong and weak sides.",
    "What does this shell command do: find . -name '*.log' -mtime +7 -delete",
    "Tell me about the history of the printing press.",
)
_PROSE = (
    "The",
    "In",
    "It was",
    "A",
    "1.",
    "Dear",
    "Chapter",
    "Question:",
    "The following section describes how the",
    "If the argument is not given, the",
    "In 19",
    "She looked at the",
    "The results of the study show that",
    "According to the",
    "How to",
    "Note that this",
    "There are two kinds of",
    "The city of",
    "When",
    "## ",
    "Die",
    "Le",
)
_CODE = (
    "def ",
    "import ",
    "# ",
    "class ",
    "    def __init__(self, ",
    "from __future__ import annotations\n\nimport ",
    "for ",
    "if (",
    "#include <",
    "function ",
    "SELECT ",
    "<p>",
    '{\n  "',
    '"""',
)


@dataclass(frozen=True)
class CalibrationTokens:
    """What the model is shown."""

    sequences: tuple[tuple[int, ...], ...]
    """Token ids, BOS first where the model wants it; of different lengths, without padding."""
    hash: str
    """SHA-256 of the ids and where sequences end."""
    notices: tuple[Notice, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)


def calibration_tokens(
    spec: CalibrationSpec,
    tokenizer: Tokenizer,
    vocab_size: int,
    templates: ChatTemplates | None = None,
    generate: Generate | None = None,
) -> CalibrationTokens | None:
    """The sequences that ``spec`` asks for; None for the source ``none``.

    Args:
        vocab_size: rows of the model's embedding; an id at or above it is refused.
        templates: the model's chat templates, for conversations in a file and for ``self``.
        generate: for ``self``: continues prompts, see recipe.Generate.

    Raises:
        UsageError: ``self`` without ``generate``.
        NotFoundError, BadInputError: a file that is missing, no UTF-8 text, or too short.
    """
    if spec.source == "none":
        return None
    if spec.source == "self":
        if generate is None:
            raise UsageError("calibration 'self' needs a model that runs: give a file, or none")
        sequences = _written_by_model(spec, tokenizer, templates, generate)
        where = "the model's own text"
    else:
        assert spec.path is not None
        where = str(spec.path)
        sequences = _from_file(spec, tokenizer, templates)
    for sequence in sequences:
        worst = max(sequence)
        if worst >= vocab_size or min(sequence) < 0:
            raise BadInputError(f"{where}: token id {worst} is none of the model's {vocab_size}")
    tokens = sum(len(sequence) for sequence in sequences)
    if tokens < MIN_TOKENS:
        raise BadInputError(
            f"{where}: {tokens} tokens are too few to calibrate with: at least {MIN_TOKENS} are needed, "
            f"{FEW_TOKENS:,} or more are advised (or take calibration none)"
        )
    notices = []
    if tokens < FEW_TOKENS:
        detail = f"calibration has {tokens:,} tokens; {FEW_TOKENS:,} or more give better codes"
        notices.append(Notice("few_calibration_tokens", detail))
    return CalibrationTokens(tuple(sequences), hash_of(sequences), tuple(notices))


def within_context(spec: CalibrationSpec, context_length: int) -> tuple[CalibrationSpec, list[Notice]]:
    """``spec`` with sequences no longer than the ``context_length`` tokens that the model was trained for.

    Behind them positions mean nothing to it, and what its linears read there is none of its usual inputs. A
    notice says what was clipped.
    """
    longest = max(_SHORTEST, context_length)
    if spec.source == "none" or spec.sequence_length <= longest:
        return spec, []
    detail = (
        f"calibration sequences have {longest:,} tokens, the model's context, not {spec.sequence_length:,}: "
        "behind it a model's inputs are not those that it was trained for"
    )
    return replace(spec, sequence_length=longest), [Notice("sequence_length_clipped", detail)]


def hash_of(sequences: Sequence[Sequence[int]]) -> str:
    """SHA-256 of token sequences: 4 bytes little-endian per id, a count before each sequence."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(4, "little"))
        digest.update(b"".join(token.to_bytes(4, "little") for token in sequence))
    return digest.hexdigest()


def _from_file(
    spec: CalibrationSpec, tokenizer: Tokenizer, templates: ChatTemplates | None
) -> list[tuple[int, ...]]:
    """Windows of the documents of a file, drawn with the seed, each with BOS where the model wants it."""
    assert spec.path is not None
    documents = _documents(spec.path, templates)
    order = random.Random(spec.seed)
    order.shuffle(documents)
    windows: list[tuple[int, ...]] = []
    wanted = 4 * spec.samples  # enough to draw from, without encoding a huge file whole
    for document, is_chat in documents:
        if len(windows) >= wanted and len(documents) > 1:
            break
        windows += _windows(tokenizer, document, spec.sequence_length, is_chat=is_chat)
    if len(windows) > spec.samples:
        windows = order.sample(windows, spec.samples)
    return windows


def _windows(tokenizer: Tokenizer, text: str, length: int, *, is_chat: bool) -> list[tuple[int, ...]]:
    ids = tokenizer.encode(text, add_special=False, parse_special=is_chat)
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if first and ids[:1] == first:
        ids = ids[1:]  # the template has written it
    step = max(1, length - len(first))
    parts = (ids[start : start + step] for start in range(0, len(ids), step))
    return [(*first, *part) for part in parts if len(part) + len(first) >= _SHORTEST or len(ids) < _SHORTEST]


def _documents(path: Path, templates: ChatTemplates | None) -> list[tuple[str, bool]]:
    """The texts of a file, each with whether it is a rendered conversation."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadInputError(
                f"{path}: the file is larger than {MAX_FILE_BYTES >> 20} MiB: give a part of it"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: this is no UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise NotFoundError(f"{path}: the calibration file cannot be read: {error.strerror}") from None
    if path.suffix not in (".jsonl", ".json"):
        return [(part, False) for part in _pieces(text)]
    documents = []
    # Not splitlines: JSON strings may hold U+2028, U+0085 and other ends of lines as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            documents.append(_document(line, f"{path}, line {number}", templates))
    return documents


def _pieces(text: str, size: int = 1 << 16) -> list[str]:
    """A long text cut at line ends, so that a few drawn pieces need not wait for the whole to be encoded."""
    pieces, start = [], 0
    while start < len(text):
        end = len(text) if start + size >= len(text) else text.rfind("\n", start, start + size) + 1
        end = end if end > start else min(len(text), start + size)
        pieces.append(text[start:end])
        start = end
    return pieces


def _document(line: str, where: str, templates: ChatTemplates | None) -> tuple[str, bool]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise BadInputError(f"{where}: this is no JSON") from None
    if isinstance(found, dict) and isinstance(found.get("text"), str):
        return found["text"], False
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadInputError(f'{where}: an object with "text" or "messages" is needed')
    if templates is None:
        raise BadInputError(f"{where}: the model has no chat template for these messages")
    return templates.render(messages, add_generation_prompt=False), True


def _written_by_model(
    spec: CalibrationSpec, tokenizer: Tokenizer, templates: ChatTemplates | None, generate: Generate
) -> list[tuple[int, ...]]:
    """Answers to varied requests through the chat template, prose and code after short beginnings, in turn.
    Texts that end early are followed by others, until there are as many tokens as ``spec.samples`` whole
    sequences have."""
    draw = random.Random(spec.seed)
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    sequences: list[tuple[int, ...]] = []
    left = spec.samples * spec.sequence_length
    for turn in range(_ROUNDS):
        usual = sum(len(text) for text in sequences) // len(sequences) if sequences else spec.sequence_length
        prompts = []
        for index in range(min(spec.samples, -(-left // usual))):
            if templates is not None and index % 3 == 0:
                text = templates.render(
                    [{"role": "user", "content": draw.choice(_REQUESTS)}], add_generation_prompt=True
                )
                ids = tokenizer.encode(text, add_special=False, parse_special=True)
            else:
                ids = tokenizer.encode(draw.choice((_PROSE, _CODE)[index % 2]), add_special=False)
            if ids[: len(first)] != first:
                ids = [*first, *ids]
            prompts.append(ids[: spec.sequence_length - 1])
        longest = max(len(prompt) for prompt in prompts)
        answers = generate(prompts, spec.sequence_length - longest, spec.seed + turn)
        if len(answers) != len(prompts):
            raise BadInputError(f"{len(prompts)} prompts were continued, {len(answers)} answers came")
        for prompt, answer in zip(prompts, answers, strict=True):
            joined = (*prompt, *answer)[: min(spec.sequence_length, left)]
            if len(joined) >= _SHORTEST:
                sequences.append(joined)
                left -= len(joined)
        if left < _SHORTEST:
            break
    return sequences

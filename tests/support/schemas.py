"""Random JSON schemas whose answers are short, and walks through a constraint."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

from edgellm.constraint.matcher import Constraint
from edgellm_models.tokenizer.base import Tokenizer

WORDS = ("red", "green", "blau", "naïve", "日本", "a b", 'say "hi"', "x\\y", "🫠", "")
NAMES = ("name", "age", "größe", "is ok", "id", "tags")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of bounded answers: most of them end within a few dozen tokens."""
    kinds = ["enum", "const", "integer", "number", "boolean", "null", "string", "pattern", "date", "nullable"]
    if depth:
        kinds += ["object", "object", "object", "array", "any_of", "ref", "tuple"]
    match rng.choice(kinds):
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, None, True], 3)}
        case "const":
            return {"const": rng.choice([*WORDS, 17, [1, {"a": None}], {"k": "v"}])}
        case "integer":
            low = rng.randint(-50, 100)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.choice([1, 10, 2.5])}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([r"^[a-c]{1,4}$", r"^\d{2}-\d{2}$", "^(é|ü)+z$"])}
        case "date":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
        case "nullable":
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 9}
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
        case "tuple":
            first, second = random_schema(rng, 0), random_schema(rng, 0)
            return {"type": "array", "prefixItems": [first, second], "items": False, "minItems": 2}
        case "any_of":
            return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
        case "ref":
            return {
                "$defs": {"part": random_schema(rng, 0)},
                "type": "object",
                "properties": {"part": {"$ref": "#/$defs/part"}},
                "required": ["part"],
                "additionalProperties": False,
            }
        case _:
            names = rng.sample(NAMES, rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.8],
                "additionalProperties": False,
            }


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` schemas that differ. References stay inside the part that holds them, so only the outermost
    schema may have one."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        schema = random_schema(rng)
        text = json.dumps(schema)
        if '"$ref"' not in text or "$defs" in schema:
            found[text] = schema
    return list(found.values())


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Whether the text is JSON that meets the schema, as the jsonschema package judges."""
    import jsonschema

    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


def allowed_ids(mask: bytes) -> list[int]:
    """The ids of a packed mask, read bit by bit."""
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def text_bytes(tokenizer: Tokenizer, token_ids: Iterable[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in token_ids if i not in tokenizer.eos_ids)


def walk(constraint: Constraint, rng: random.Random, limit: int) -> list[int]:
    """Ids of a random answer: each drawn evenly from the mask, until it ends or ``limit`` is reached."""
    ids: list[int] = []
    while len(ids) < limit and not constraint.is_finished:
        token_id = rng.choice(allowed_ids(constraint.mask()))
        constraint.advance([token_id])
        ids.append(token_id)
    return ids

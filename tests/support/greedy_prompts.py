"""Twenty prompts of many kinds for comparisons of greedy text, and one longer than three sliding windows."""

from __future__ import annotations

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics state that",
    "SELECT name, COUNT(*) FROM orders",
    "Q: What is 17 times 23?\nA:",
    "import numpy as np\n\ndef softmax(x):",
    "Der schnelle braune Fuchs springt",
    "La vie est belle quand on",
    "中国的首都是",
    "The first ten prime numbers are 2, 3, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "| name | age |\n|---|---|\n| Ada |",
    '{"title": "Moby Dick", "author":',
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "In 1969, the Apollo 11 mission",
    "To be, or not to be, that is the",
    "The difference between a stack and a queue is",
    "Translate to Spanish: Good morning, my friend. Where is the library?",
)


def _long_prompt() -> str:
    """Numbered notes that do not repeat, of more than 1,500 tokens with either vocabulary."""
    places = ("harbour", "mill", "chapel", "market", "orchard", "quarry", "bridge", "school")
    deeds = ("measured", "painted", "repaired", "counted", "described", "visited", "closed", "sold")
    lines = ["Notes of the surveyor, day by day.", ""]
    for day in range(1, 61):
        place, deed = places[day * 5 % 8], deeds[day * 3 % 8]
        other = places[(day * 7 + 2) % 8]
        lines.append(
            f"Day {day}: I {deed} the {place} in the morning, walked {day * 37 % 91} paces to the {other}, "
            f"and wrote down {day * 113 % 997} stones, {day * 29 % 61} doors and a remark on the weather."
        )
    return "\n".join([*lines, f"Day {len(lines) - 1}: I"])


LONG_PROMPT = _long_prompt()

"""A small text of our own in several scripts: trains the fixtures' vocabularies and tests them."""

from __future__ import annotations

TRAINING_TEXT = """\
The harbour was quiet before the ships came in, and the old keeper of the light counted them one by one.
There were seven ships that morning, seven more in the evening, and none at all when the weather turned.
She wrote the numbers down in a book: 7 ships, 14 ships, 21 ships, 365 days, 1,024 barrels, 2048 ropes.
"What is the weather like today?" asked the captain. "It's clear, and it'll stay clear," answered the keeper.
They're going to sail at noon; I've seen them load the cargo, and we'd better not wait for the others.
When the wind is from the north the water is cold, when the wind is from the south the water is warm.
A model reads the text token by token and says which token it thinks is the next one in the sentence.
The quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly.
Bread, cheese, apples and a bottle of water: that is what the children carried in their basket.
Please write a short story about the sea, the light and the keeper, and then explain the story.
def count_ships(ships: list[int], limit: int = 10) -> int:
    total = 0
    for index, ship in enumerate(ships):
        if ship > limit and index != 0:
            total += ship * 2
    return total
for (int i = 0; i < 128; ++i) { sum += values[i] / 3.14159; }
{"name": "keeper", "age": 61, "ships": [1, 2, 3], "light": true, "note": null}
Le café est près de la forêt; l'été, les élèves mangent des crêpes où ils veulent.
Die Straße führt über die Brücke, größer als früher, und die Kühe stehen am Fluss.
El niño comió una piña mañana; ¿cuántos años tienes? ¡Qué día más bonito!
Кошка сидит на окне и смотрит на море, а море смотрит на кошку.
今天天气很好，我们去海边看船。船很多，人也很多。
海の上に船が七つあります。とても静かです。
안녕하세요, 오늘 바다는 조용합니다.
😀 😃 🚢 🌊 👍🏽 👨‍👩‍👧 ⏺️ — “quoted” … and • bullets ✓
ALL CAPITALS SHOUT, MixedCase and snake_case and kebab-case and CamelCaseWords.
Tabs\tand  double  spaces   and trailing spaces   \r
    indented lines with four spaces
        indented lines with eight spaces


https://example.org/path?query=1&other=two#part and name@example.org
"""

SAMPLE_TEXTS: tuple[str, ...] = (
    "Hello world! Café déjà vu — 123 😊",
    "The keeper of the light counted 7 ships.",
    "12345 I'LL\r\n\r\n  x\té中文 🫠",
    "  leading and   inner spaces  ",
    "def f(x):\n    return x ** 2\n\n\n",
    "It's what they'd say, isn't it? WE'RE here.",
    "今天天气很好 море кошка straße",
    "a\u0301 e\u0301 combining, nbsp\u00a0here, zero\u200bwidth",
    "1234567890 3.14 1,000,000",
    "\n\n\t\t \n x",
    "",
)
"""Texts on which two tokenizers that should be one are compared (field reports A11, A17)."""

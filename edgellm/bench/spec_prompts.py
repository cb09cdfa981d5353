"""The prompts that speculation is measured on: natural text of six kinds, six or more of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COPIES = ("summary", "code edit", "retrieval")
"""Classes whose answers repeat their prompts."""

PASSAGES = (
    "The harbour of Lisbow was built in 1743 by the engineer Marten Hoek. It had two stone piers and a "
    "lighthouse of green glass. In 1802 a storm broke the northern pier, and the town council decided to "
    "rebuild it from granite that was brought by ship from Norway. The work took eleven years.",
    "Bees find flowers by colour and scent. A worker that has found a rich field returns to the hive and "
    "dances on the comb. The angle of the dance tells the direction relative to the sun, and its length "
    "tells the distance. Other workers follow the dance in the dark and then fly to the field.",
    "The committee met on Tuesday in the library. Anna Berg reported that the roof repair will cost 48,000 "
    "crowns. Jonas Lind proposed to pay half of it from the reserve fund. The proposal was accepted with "
    "seven votes against two. The next meeting is on the fourth of May at six o'clock.",
    "To reset the thermostat, press and hold the round button for ten seconds until the display shows three "
    "dashes. Release the button and wait for the blue light. If the light stays red, the sensor cable is "
    "loose: switch the power off, open the cover and push the white connector in until it clicks.",
    "Glaciers move because ice under pressure deforms and slides over its bed. Meltwater at the base works "
    "as a lubricant, so that many glaciers are faster in summer. Where a glacier ends in the sea, pieces "
    "break off and float away as icebergs. Scientists measure the movement with radar and with satellites.",
    "Clara's grandmother kept a small shop in Weaver Street. She sold thread, buttons and blue ink, and "
    "every child who came in was given one peppermint. When the shop closed in 1968, the counter was given "
    "to the museum, where it still stands beside the window with the brass scale and the box of buttons.",
)
SNIPPETS = (
    "def total_price(items, tax_rate):\n    subtotal = 0\n    for item in items:\n        subtotal += "
    "item.price * item.quantity\n    tax = subtotal * tax_rate\n    return subtotal + tax",
    "class Counter:\n    def __init__(self):\n        self.count = 0\n\n    def increment(self):\n        "
    "self.count += 1\n\n    def reset(self):\n        self.count = 0",
    "function average(values) {\n  let sum = 0;\n  for (const value of values) {\n    sum += value;\n  }\n"
    "  return sum / values.length;\n}",
    "def read_lines(path):\n    with open(path) as file:\n        lines = file.readlines()\n    return "
    "[line.strip() for line in lines if line.strip()]",
    "SELECT name, city, COUNT(*) AS orders\nFROM customers\nJOIN orders ON orders.customer_id = "
    "customers.id\nWHERE city = 'Oslo'\nGROUP BY name, city\nORDER BY orders DESC;",
    "def binary_search(values, target):\n    low, high = 0, len(values) - 1\n    while low <= high:\n        "
    "middle = (low + high) // 2\n        if values[middle] == target:\n            return middle\n        if "
    "values[middle] < target:\n            low = middle + 1\n        else:\n            high = middle - 1\n"
    "    return -1",
)
EDITS = (
    "Rename tax_rate to rate",
    "Rename count to total",
    "Rename sum to result",
    "Rename lines to rows",
    "Change Oslo to Bergen",
    "Rename middle to mid",
)
ASKED = (
    "who built the harbour",
    "what the length of the dance tells",
    "what the roof repair will cost",
    "what to do if the light stays red",
    "why many glaciers are faster in summer",
    "what was given to the museum",
)
CHATS = (
    "Give me three ideas for a rainy afternoon with two children.",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "What should I pack for a weekend in the mountains?",
    "How do I politely decline an invitation to a wedding?",
    "Tell me about a day in the life of a baker.",
)
FOLLOW_UPS = (
    "Which of these would you do first, and why?",
    "Now say the same for somebody who knows physics.",
    "Write it again with another last line.",
    "Put that into a list, the heaviest things first.",
    "Make it shorter and a little warmer.",
    "Tell the part about the morning again, with more detail.",
)
"""To the answers to ``CHATS``."""
RECORDS = (
    "Ada Kern, 34, engineer, lives in Ulm and speaks German, English and Czech.",
    "The Heron is a boat of 9.5 metres built in 1987; it sleeps four and costs 21,500 euros.",
    "Order 7741: two lamps at 39.50, one table at 210.00, to be sent to Oak Street 12 in Leeds.",
    "On 4 May the bus leaves Graz at 7:10, Bruck at 8:02 and arrives in Vienna at 10:25.",
    "The recipe takes 250 g of flour, 3 eggs, half a litre of milk and a pinch of salt; it serves four.",
    "Sensor 12 in the cellar read 11.5 degrees at 6:00, 12.0 degrees at 7:00 and 12.25 degrees at 8:00.",
)

Prompts = Mapping[str, Sequence[Sequence[str]]]
"""By class its prompts; each is what a person says in turn."""


def prompts() -> Prompts:
    """All classes."""
    return {
        "chat": [[text] for text in CHATS],
        "second turn": [[chat, more] for chat, more in zip(CHATS, FOLLOW_UPS, strict=True)],
        "summary": [
            [f"{p}\n\nSummarize this text in its own words, sentence by sentence."] for p in PASSAGES
        ],
        "code edit": [
            [f"{edit} in this code and write the whole code again:\n\n{snippet}"]
            for edit, snippet in zip(EDITS, SNIPPETS, strict=True)
        ],
        "json": [
            [f"Write this as one JSON object with a field for every fact, and nothing else:\n\n{record}"]
            for record in RECORDS
        ],
        "retrieval": [
            [f"{p}\n\nCopy the sentences of the text that say {asked}, then the whole text."]
            for p, asked in zip(PASSAGES, ASKED, strict=True)
        ],
    }

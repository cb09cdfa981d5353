"""The texts that a model answers while layer skip is calibrated: chat, code, summary, JSON, maths, French."""

from __future__ import annotations

PROMPTS = (
    "My neighbour gave me a basket of plums. What can I make of them in an hour?\n\nYou could",
    "def most_common_word(text):\n    words = text.lower().split()\n    counts = {}\n    for word in words:"
    "\n",
    "The ferry to the island was cancelled on Monday because of strong wind, and the passengers spent the "
    "night in the school. On Tuesday the sea was calm and two boats brought everybody across.\n\nIn short:",
    '{"name": "Nadia Brandt", "city": "Graz", "orders": [{"item": "lamp", "price": 39.5, "count": 2}, {',
    "Question: A train leaves at 8:20 and arrives at 11:05. How long does it travel?\nAnswer: From 8:20 to",
    "Le marché du village ouvre tous les samedis à sept heures. On y trouve du pain, du fromage et",
)

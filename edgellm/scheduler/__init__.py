"""Which tokens of which sequences the next step runs. Integers only, no torch."""

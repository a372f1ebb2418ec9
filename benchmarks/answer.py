"""What the contenders of ``llama_cpp.py`` report, from whatever process they run in."""

from dataclasses import dataclass


@dataclass
class Answer:
    """What one contender said to one group of prompts."""

    tokens: list[list[int]]
    seconds: float
    """From the request to the last token of the group."""
    decode_seconds: float
    """From the first token to the last, of the slowest prompt."""
    gained: int
    """Tokens after the first of each answer."""
    passes: int
    """Passes of the target that gave them."""

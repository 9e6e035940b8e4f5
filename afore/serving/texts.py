"""Texts of requests on their way to token ids: what is too long to fit is refused unread, long ones are read beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

QUICK_CHARACTERS = 8192
"""So many are tokenized in milliseconds, which the event loop can spare; more go into a thread."""
SHRINKS = 4
"""How many times shorter than its text the tokens' spellings may be (Unicode normalisation), at most."""


def most_characters(max_model_len: int, longest_token: int) -> int:
    """No text with more characters fits ``max_model_len`` tokens, the longest of which has ``longest_token`` characters."""
    return max_model_len * longest_token * SHRINKS


class Reader:
    """Tokenizes the texts of one event loop; of the long ones one at a time, so that they cannot take every core."""

    def __init__(self) -> None:
        # One thread, and not a lock: a text that nobody wants any more holds it until it is through.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def read(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """``encode(text)``, in a thread where that takes long. Raises what it raises."""
        if len(text) <= QUICK_CHARACTERS:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, text)

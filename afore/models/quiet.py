"""Switches of torch and transformers that are global to the process, set for a block and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs the block with one torch thread: sums come out in one order, and a busy machine is not made busier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keeps transformers from drawing a bar on stderr while it loads or saves."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

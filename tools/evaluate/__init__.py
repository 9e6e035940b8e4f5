"""``python -m afore.tools.evaluate``: the paper's evaluation, and a user's own, in virtual time on emulated hardware."""

from afore.tools.evaluate.command import main

__all__ = ["main"]

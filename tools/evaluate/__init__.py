"""``python -m afore.tools.evaluate``: the paper's evaluation, and a user's own, in virtual time on emulated hardware."""

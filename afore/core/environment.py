"""What the environment gives that no option may: an argument is seen by every user of the machine."""

from __future__ import annotations

import os

SECRET = "AFORE_SECRET"
"""The cluster's shared secret, as an alternative to ``topology.secret_file``."""


def take_secret() -> str | None:
    """The secret of the environment, taken out of it: no process that this one starts inherits it. None where there is none."""
    return os.environ.pop(SECRET, None)

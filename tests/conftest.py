"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# Tests never assert a time: on a shared machine hypothesis' own deadline would, and fail at random.
settings.register_profile("afore", deadline=None)
settings.load_profile("afore")

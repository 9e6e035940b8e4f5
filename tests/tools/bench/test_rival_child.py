"""The other side of a comparison: rows of one batch that end at lengths of their own."""

from __future__ import annotations

import pytest

from afore.models.bundle import bundled_model_path
from afore.tools.bench.rival_child import Rival

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.mark.slow
def test_each_row_is_as_long_as_asked_and_the_same_as_cut_from_a_longer_one() -> None:
    rival = Rival(str(bundled_model_path()), 1)
    long = rival.run("grouped_mm", PROMPTS, [6, 6, 6], True)["tokens"]
    found = rival.run("grouped_mm", PROMPTS, [2, 6, 4], True)
    assert found["tokens"] == [long[0][:2], long[1], long[2][:4]]
    assert found["decode_tokens"] == 2 + 6 + 4 - 3

"""A few hundred hostile requests; ``python -m tests.serving.http.hostile 2500`` sends more."""

from __future__ import annotations

import httpx
import pytest

from tests.serving.http.hostile import run


@pytest.mark.slow
def test_hostile_requests_are_refused_by_field_and_do_no_harm(http: httpx.Client) -> None:
    counts = run(http, 250)
    assert counts.get(400, 0) > 100
    assert set(counts) <= {200, 400, 404}

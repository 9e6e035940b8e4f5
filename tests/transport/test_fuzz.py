"""Random and mutated bytes wherever AFORE reads what others wrote. A million of them: ``python -m tests.transport.fuzz``."""

from __future__ import annotations

import pytest

from tests.transport.fuzz import SURFACES, run


@pytest.mark.slow
def test_nothing_that_is_read_breaks_its_reader() -> None:
    outcome = run(10_000, seed=1)
    assert outcome.cases.keys() == SURFACES.keys()
    # Neither everything nor nothing is accepted: mutations are neither harmless nor hopeless. No client without the secret is.
    assert all(0 < outcome.accepted[name] < outcome.cases[name] for name in SURFACES if name != "hellos")

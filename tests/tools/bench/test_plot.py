"""The picture: its curves by hand, and a file where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from afore.core.errors import ConfigError
from afore.tools.bench.latency import Record
from afore.tools.bench.plot import FORMATS, check_plot, cumulative, draw_latencies

RECORD = Record(
    index=0, due_ns=0, sent_ns=0, chunks_ns=(5, 9), ended_ns=9, prompt_tokens=1, output_tokens=2
)  # fmt: skip


def test_shares_by_hand() -> None:
    assert cumulative([3, 1, 1, 2]) == ([1, 1, 2, 3], [0.25, 0.5, 0.75, 1])
    assert cumulative([]) == ([], [])


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of png, svg, pdf"):
        draw_latencies([RECORD], "picture.bmp")
    with pytest.raises(ConfigError, match="none of png, svg, pdf"):
        check_plot("picture")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_is_written(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need afore[bench]")
    path = tmp_path / f"picture.{kind}"
    draw_latencies([RECORD], str(path))
    assert path.stat().st_size > 1000

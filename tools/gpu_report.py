"""The report of a GPU check: one JSON, one Markdown page, and the picture of what overlapped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from afore.tools.bench.files import write_whole

LIMITS = "One GPU proves neither peer copies between GPUs nor NVLink nor NCCL over several GPUs: nothing here speaks of them."
FILES = "files"
"""Of a part's result: texts by name, which become files beside the report."""
_WIDTH, _LANE, _LEFT = 860, 34, 190


def write_report(out: Path, report: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes ``gpu_check.json``, ``gpu_check.md``, files of parts and, where overlap was measured, ``overlap.svg`` into ``out``.

    Each appears whole or not at all, and what could not be written is not lost: the same report can be written elsewhere. Raises
    ``HostError``, ``OSError``.
    """
    out.mkdir(parents=True, exist_ok=True)
    for part in report["parts"].values():
        result = part.get("result", {})
        for name, text in result.get(FILES, {}).items():
            write_whole(str(out / Path(name).name), text.encode())
        result.pop(FILES, None)
    spans = report["parts"].get("overlap", {}).get("result", {}).get("spans")
    if spans:
        write_whole(str(out / "overlap.svg"), picture(spans).encode())
    json_path, page = out / "gpu_check.json", out / "gpu_check.md"
    write_whole(str(json_path), (json.dumps(report, indent=1) + "\n").encode())
    write_whole(str(page), markdown(report, drawn=bool(spans)).encode())
    return json_path, page


def markdown(report: Mapping[str, Any], *, drawn: bool) -> str:
    """The page."""
    lines = ["# GPU check", "", f"{report['date']}, AFORE {report['afore']}, {report['took_s']:.0f} s.", "", LIMITS, ""]
    lines += ["## Machine", "", *[f"- {line}" for line in report["machine"]], ""]
    lines += ["| package | version |", "|---|---|"]
    lines += [f"| {name} | {version or 'not installed'} |" for name, version in report["packages"].items()]
    if report.get("refused"):
        lines += ["", f"**The GPU could not be asked: {report['refused']}**"]
    lines += ["", "## Parts", "", "| part | outcome | seconds |", "|---|---|---|"]
    for name, part in report["parts"].items():
        lines.append(f"| {name} | {part['outcome']} | {part['took_s']:.1f} |")
    for name, part in report["parts"].items():
        lines += ["", f"## {name}", "", part["about"], ""]
        if part["outcome"] != "passed":
            lines += [f"**{part['outcome']}**", "", "```", part.get("why", "").rstrip(), "```"]
        lines += ["", *[f"- {key}: {part[key]}" for key in ("beside", "left") if key in part]]
        lines += _section(part.get("result", {}))
        if name == "overlap" and drawn:
            lines += ["", "![copies and compute, alone and together](overlap.svg)"]
    return "\n".join(lines) + "\n"


def _section(result: Mapping[str, Any]) -> list[str]:
    """Numbers as a list, lists of the same keys as tables."""
    lines: list[str] = []
    for key, value in result.items():
        if key in ("spans", "points"):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            columns = [name for name, cell in value[0].items() if not isinstance(cell, list | dict)]
            lines += ["", f"{key}:", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines += [f"| {' | '.join(_shown(row.get(name)) for name in columns)} |" for row in value]
            lines.append("")
        elif isinstance(value, dict):
            inner = ", ".join(f"{name} {_shown(cell)}" for name, cell in value.items() if not isinstance(cell, dict))
            lines.append(f"- {key}: {inner}")
            lines += [f"  - {name}: {_shown(cell)}" for name, cell in value.items() if isinstance(cell, dict)]
        else:
            lines.append(f"- {key}: {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(cell)}" for name, cell in value.items())
    return str(value)


def picture(spans: Sequence[Mapping[str, Any]]) -> str:
    """Lanes over microseconds, as SVG."""
    longest = max(span["to_us"] for span in spans) or 1.0
    scale = (_WIDTH - _LEFT - 80) / longest
    height = _LANE * len(spans) + 30
    rows = []
    for index, span in enumerate(spans):
        y, colour = 10 + index * _LANE, "#4878a8" if "compute" in span["lane"] else "#d08040"
        x, width = _LEFT + span["from_us"] * scale, max(1.0, (span["to_us"] - span["from_us"]) * scale)
        rows.append(f'<text x="4" y="{y + 17}">{escape(span["lane"])}</text>')
        rows.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 10}" fill="{colour}"/>')
        rows.append(f'<text x="{x + width + 4:.1f}" y="{y + 17}">{span["to_us"]:.0f} µs</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n' + "\n".join(rows) + "\n</svg>\n"
    )

"""The pages of the documentation, and what stands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code or output."""

    language: str
    text: str


class Page:
    """One Markdown file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = ROOT / name
        self.text = self.path.read_text(encoding="utf-8")
        self.blocks = tuple(Block(language, text) for language, text in _FENCE.findall(self.text))
        self.prose = _FENCE.sub("", self.text)

    @property
    def inline(self) -> tuple[str, ...]:
        """Every piece of inline code."""
        return tuple(_INLINE.findall(self.prose))

    @property
    def links(self) -> tuple[str, ...]:
        """Every link's and picture's target."""
        return tuple(_LINK.findall(self.prose))

    @property
    def anchors(self) -> frozenset[str]:
        """What ``#…`` may name: headings, as GitHub makes anchors of them."""
        return frozenset(
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(self.prose)
        )

    @property
    def commands(self) -> tuple[str, ...]:
        """Every command line: of console blocks (behind ``$``), and inline."""
        lines = [
            line.removeprefix("$ ").partition("  #")[0].strip()
            for block in self.blocks
            if block.language == "console"
            for line in block.text.splitlines()
            if line.startswith("$ ")
        ]
        return (*lines, *(code for code in self.inline if code.startswith(("python ", "make "))))

    def code(self, language: str) -> tuple[str, ...]:
        """The fenced blocks of one language."""
        return tuple(block.text for block in self.blocks if block.language == language)

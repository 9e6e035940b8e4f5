"""The model and the prompts that come with AFORE: nothing to download for a first run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One real prompt; origin and licence are in data/README.md."""

    id: str
    domain: str
    """``math``, ``chat``, ``code`` or ``web``."""
    prompt: str
    max_new_tokens: int


def bundled_model_path() -> Path:
    """Directory of the bundled ``tiny-glm4moe`` checkpoint."""
    return _DATA / "tiny-glm4moe"


def bundled_prompts() -> tuple[Prompt, ...]:
    """The 32 bundled prompts, eight of each domain."""
    lines = (_DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Prompt(**json.loads(line)) for line in lines)

"""The four kinds of traffic: how their routing varies, how long their prompts are, when requests come; embedded, with sources.

No file of another project is needed: what is known of each is a few numbers. A user's own routing takes the place of the generated
one with ``--routing`` (``tools/evaluate/demand.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

CHARACTERS_OF_A_TOKEN = 4
"""English text and code under vocabularies of 100,000 tokens and more: what makers of tokenizers publish."""
LONGEST_PROMPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of traffic.

    ``spread``, ``alike`` and ``within`` are of GLM-5.2's published counts by chunk of text (Dorijan10/glm-expert-pruning, MIT: 75
    layers, 256 experts, four domains), means over layers.
    """

    name: str
    about: str
    spread: float
    """Standard deviation of the logarithm of experts' shares."""
    alike: float
    """Correlation of those logarithms between two topics of the traffic."""
    within: float
    """Standard deviation of the same logarithm between chunks of one topic."""
    prompt_source: str
    """Whose lengths ``prompt_characters`` are."""
    prompt_characters: tuple[int, ...]
    """Quantiles of lengths, every 5 %."""


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        w.name: w
        for w in (
            Workload(
                name="chat",
                about="conversations (ShareGPT in the paper): topics as different as GLM-5.2's domains",
                spread=0.62,
                alike=0.35,
                within=0.25,
                prompt_source="444 turns of UltraChat conversations (MIT), with what was said before",
                prompt_characters=(
                    38, 85, 218, 391, 500, 580, 910, 1349, 1717, 1978, 2330,
                    2701, 2988, 3277, 3723, 4107, 4672, 5257, 5804, 7125, 11152,
                ),
            ),
            Workload(
                name="web",
                about="documents (FineWeb): the most varied text, topics as different as GLM-5.2's domains",
                spread=0.60,
                alike=0.35,
                within=0.27,
                prompt_source="321 C4 documents (ODC-BY)",
                prompt_characters=(
                    502, 559, 621, 741, 807, 899, 1034, 1206, 1388, 1521, 1673,
                    1820, 2123, 2529, 2708, 3073, 3532, 4435, 5197, 7299, 26437,
                ),
            ),
            Workload(
                name="code",
                about="programming problems (CodeForces): one domain, whose chunks differ",
                spread=0.53,
                alike=0.87,
                within=0.19,
                prompt_source="293 evol-codealpaca problems (Apache-2.0), in place of CodeForces' statements",
                prompt_characters=(
                    51, 96, 116, 145, 164, 196, 222, 259, 285, 308, 350,
                    397, 450, 519, 588, 652, 747, 868, 1102, 1503, 20188,
                ),
            ),
            Workload(
                name="math",
                about="short word problems (GSM8K): one narrow domain, whose chunks differ least",
                spread=1.16,
                alike=0.98,
                within=0.11,
                prompt_source="7,473 GSM8K questions (MIT)",
                prompt_characters=(
                    42, 117, 134, 147, 158, 168, 177, 186, 196, 206, 217, 228, 239, 251, 264, 280, 300, 326, 361, 414, 985,
                ),
            ),
        )
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come and what they ask for: an hour of Azure's traces of 2023 (Azure/AzurePublicDataset, CC-BY-4.0)."""

    name: str
    gaps: tuple[float, ...]
    """Quantiles of the time between two requests over its mean, every 1/32."""
    output_tokens: tuple[int, ...]
    """Quantiles of generated tokens, every 5 %."""


ARRIVALS: Mapping[str, Arrivals] = MappingProxyType(
    {
        a.name: a
        for a in (
            Arrivals(
                name="azure-conv",
                gaps=(
                    0.0, 0.015, 0.049, 0.0821, 0.1189, 0.1528, 0.188, 0.2259, 0.267, 0.3105, 0.3535, 0.397, 0.4438, 0.4923,
                    0.5433, 0.5938, 0.6549, 0.7222, 0.787, 0.8628, 0.9459, 1.0307, 1.1344, 1.2476, 1.3645, 1.4968, 1.6706,
                    1.8702, 2.091, 2.3899, 2.8504, 3.6887, 23.8602,
                ),
                output_tokens=(
                    7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000,
                ),
            ),
            Arrivals(
                name="azure-code",
                gaps=(
                    0.0, 0.0002, 0.0003, 0.0005, 0.0018, 0.0024, 0.0028, 0.0039, 0.0053, 0.0073, 0.0095, 0.0129, 0.0192,
                    0.0454, 0.0832, 0.1228, 0.1637, 0.2067, 0.2357, 0.2429, 0.2477, 0.2522, 0.2558, 0.2596, 0.2669, 0.3336,
                    0.4642, 0.5076, 0.5232, 0.7409, 0.9095, 1.4914, 557.3413,
                ),
                output_tokens=(6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 1899),
            ),
        )
    }
)  # fmt: skip
_PROMPTS, _GAPS, _OUTPUTS = 1, 2, 3


def drawn(quantiles: tuple[float, ...], uniform: float) -> float:
    """The value at a place of the distribution, 0 to 1: between two quantiles in proportion."""
    at = uniform * (len(quantiles) - 1)
    below = min(int(at), len(quantiles) - 2)
    low, high = quantiles[below], quantiles[below + 1]
    return low + (high - low) * (at - below)


def prompt_lengths(workload: Workload, count: int, *, seed: int, most: int = LONGEST_PROMPT) -> list[int]:
    """Prompt lengths of ``count`` requests in tokens, 1 … ``most``."""
    places = _uniform(_PROMPTS, workload.name, count, seed)
    characters = [drawn(workload.prompt_characters, place) for place in places]
    return [min(most, max(1, round(length / CHARACTERS_OF_A_TOKEN))) for length in characters]


def arrival_times_us(arrivals: Arrivals, count: int, *, per_s: float, seed: int) -> list[float]:
    """When each of ``count`` requests comes, at ``per_s`` of them a second in the mean over all, with the trace's burstiness."""
    gaps = [drawn(arrivals.gaps, place) for place in _uniform(_GAPS, arrivals.name, count, seed)]
    scale_us = 1e6 / per_s * count / max(sum(gaps), 1e-9)
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale_us
        times.append(now)
    return times


def output_lengths(arrivals: Arrivals, count: int, *, mean: float, seed: int) -> list[int]:
    """Tokens that each of ``count`` requests asks for, 2 or more: the trace's distribution, scaled to a mean."""
    wanted = [drawn(arrivals.output_tokens, place) for place in _uniform(_OUTPUTS, arrivals.name, count, seed)]
    scale = mean * count / sum(wanted)
    return [max(2, round(tokens * scale)) for tokens in wanted]


def _uniform(kind: int, name: str, count: int, seed: int) -> list[float]:
    key = np.array([(seed << 8) | kind, zlib.crc32(name.encode())], np.uint64)
    places: list[float] = np.random.Generator(np.random.Philox(key=key)).random(count).tolist()
    return places

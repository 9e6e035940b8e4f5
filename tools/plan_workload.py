"""The pinned workload of the planner's tables: 200 demands of 128 experts, from real routing where it is at hand, else generated.

T = 2,048 tokens, top-8: 16,384 pairs a target. Both sources are brought to the paper's skew (the eight hottest experts have 24.4 %
of the pairs, the most loaded of 8 workers 1.70 times the mean), then drawn with a fixed seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.scheduler.traces.calibrate import HOT_PART, SKEW, SKEW_WORKERS, bisect, hot_part, normal, skew

EXPERTS, TOKENS, TOP_K, TILE_TOKENS = 128, 2048, 8, 64
WINDOW_TOKENS = 256
FILES = ("dsv2lite_esft_intent.npz", "dsv2lite_esft_summary.npz")
"""Per-token routing in text order: ``ids`` uint8 [tokens, 26 layers, 6] of 64 experts (DeepSeek-V2-Lite, deepseek-ai/ESFT, MIT)."""
LAYERS = (6, 19)
"""Their experts side by side are the 128: no public per-token trace has as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Demands in the order of their targets, and where they come from."""

    demands_XE: NDArray[np.int64]
    source: str
    exponent: float
    """What the shares were raised to, so that the hottest experts have the paper's part."""
    blur: float
    """Noise in the experts' order, in standard deviations of their heat, so that workers have the paper's skew."""

    def top_part(self) -> float:
        """Part of the eight hottest experts, mean over targets."""
        return hot_part(normal(self.demands_XE.astype(np.float64)))

    def skew(self, num_workers: int) -> float:
        """Mean over targets of most loaded worker / mean, on primaries, in pairs."""
        return float(skew(self.demands_XE.astype(np.float64), num_workers).mean())


def pinned(directory: Path | None, *, targets: int = 200, seed: int = 2048) -> Workload:
    """The workload of ``targets`` demands: from the trace files in ``directory``, else generated.

    Raises ``ConfigError`` where a directory is named and lacks a file.
    """
    if directory is None:
        shares_XE, source = _generated(targets, seed), f"generated: log-normal experts that drift, seed {seed}"
    else:
        shares_XE = _traced(directory, targets)
        source = (
            f"{' then '.join(FILES)}: {targets} windows of {WINDOW_TOKENS} tokens in text order, layers {LAYERS[0]} and "
            f"{LAYERS[1]} side by side, seed {seed}"
        )
    shares_XE, exponent, blur = _calibrated(shares_XE, seed)
    rng = np.random.default_rng(seed)
    demands_XE = np.array([rng.multinomial(TOKENS * TOP_K, share_E) for share_E in shares_XE], np.int64)
    return Workload(demands_XE=demands_XE, source=source, exponent=exponent, blur=blur)


def _traced(directory: Path, targets: int) -> NDArray[np.float64]:
    halves = []
    for name in FILES:
        path = directory / name
        try:
            with np.load(path) as file:
                halves.append(file["ids"][:, LAYERS, :])
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                "traces", f"{path} cannot be read: {error}", f"name a directory with {' and '.join(FILES)}"
            ) from error
    ids = np.concatenate(halves).astype(np.int64)
    half = EXPERTS // 2
    starts = np.linspace(0, len(ids) - WINDOW_TOKENS, targets).astype(np.int64)
    shares_XE = np.zeros((targets, EXPERTS))
    for x, start in enumerate(starts):
        window = ids[start : start + WINDOW_TOKENS] + np.array([0, half])[None, :, None]
        shares_XE[x] = np.bincount(window.reshape(-1), minlength=EXPERTS)
    return shares_XE


def _generated(targets: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed + 1)
    standing_E = rng.normal(size=EXPERTS)
    drift_E = rng.normal(size=EXPERTS)
    shares_XE = np.zeros((targets, EXPERTS))
    for x in range(targets):
        drift_E = 0.9 * drift_E + np.sqrt(1 - 0.81) * rng.normal(size=EXPERTS)
        shares_XE[x] = np.exp(0.8 * standing_E + 0.6 * drift_E)
    return shares_XE


def _calibrated(shares_XE: NDArray[np.float64], seed: int) -> tuple[NDArray[np.float64], float, float]:
    """(shares, exponent, blur): as hot as the paper's experts, and as unevenly spread over workers.

    The exponent sets the hottest experts' part. Then experts are put in order of their mean share blurred by noise: the less
    noise, the more hot ones share a worker.
    """
    exponent = bisect(lambda power: hot_part(normal(shares_XE**power)) - HOT_PART, 0.05, 8.0, steps=50)
    shares_XE = normal(shares_XE**exponent)
    heat_E = np.log(shares_XE.mean(axis=0) + 1e-9)  # an expert that is never chosen is coldest
    noise_E = np.random.default_rng(seed + 2).normal(size=EXPERTS) * heat_E.std()

    def ordered(blur: float) -> NDArray[np.float64]:
        return shares_XE[:, np.argsort(-(heat_E + blur * noise_E), kind="stable")]

    # The skew falls with the blur in steps, not evenly: the nearest of a grid.
    blur = min(
        np.linspace(0.0, 4.0, 401).tolist(),
        key=lambda blur: abs(float(skew(ordered(blur), SKEW_WORKERS).mean()) - SKEW),
    )
    return ordered(blur), exponent, blur

"""Shares of experts brought to the paper's skew: as hot as its experts, and as unevenly spread over workers.

The paper (GLM-4.5-Air, 128 experts): the most loaded of 8 workers has 1.70 times the mean, in the worst layer 3.3; the eight
hottest experts, one in 16, have 24.4 % of the pairs, the hottest 5.2 times the mean. Letters: G layers, P places in a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

SKEW: Final = 1.70
SKEW_WORKERS: Final = 8
WORST_LAYER: Final = 3.3
HOT_PART: Final = 0.244
HOT_ONE_OF: Final = 16
HOTTEST: Final = 5.2

Shares = NDArray[np.float64]


def calibrated(shares_GPE: Shares, seed: int) -> tuple[Shares, str]:
    """(shares, in words): one exponent for all sets how much the hottest experts have, then ``orders`` how workers differ.

    The worst layer and the hottest expert come out as they do.
    """
    exponent = bisect(lambda power: hot_part(normal(shares_GPE**power)) - HOT_PART, 0.05, 8.0)
    shares_GPE = normal(shares_GPE**exponent)
    order_GE, blur = orders(shares_GPE, seed)
    return reordered(
        shares_GPE, order_GE
    ), f"shares to the power {exponent:.2f}, experts ordered by heat with noise {blur:.2f}"


def orders(shares_GPE: Shares, seed: int, imbalance: float = SKEW) -> tuple[NDArray[np.int64], float]:
    """(which expert takes each one's place [G, E], noise): such that workers have that mean skew, as near as orders come to it.

    Each layer's experts are put in order of their mean share blurred by noise: the less noise, the more hot ones share a worker.
    Layers differ, as the paper's do: from no noise at all to twice the stated one. Experts stay what they are in all targets of a
    layer.
    """
    heat_GE = np.log(shares_GPE.mean(axis=1) + 1e-9)  # an expert that is never chosen is coldest
    rng = np.random.default_rng(seed)
    noise_GE = rng.normal(size=heat_GE.shape) * heat_GE.std(axis=1, keepdims=True)
    noise_GE *= rng.permutation(np.linspace(0.0, 2.0, len(heat_GE)))[:, None]

    def order(blur: float) -> NDArray[np.int64]:
        found: NDArray[np.int64] = np.argsort(-(heat_GE + blur * noise_GE), axis=1, kind="stable")
        return found

    # The skew falls with the blur in steps, not evenly: the nearest of a grid.
    workers = min(SKEW_WORKERS, shares_GPE.shape[2])
    grid = np.linspace(0.0, 6.0, 121).tolist()
    blur = min(grid, key=lambda blur: abs(float(skew(reordered(shares_GPE, order(blur)), workers).mean()) - imbalance))
    return order(blur), blur


def reordered(shares_GPE: Shares, order_GE: NDArray[np.int64]) -> Shares:
    """Each layer's experts in another order."""
    return np.take_along_axis(shares_GPE, order_GE[:, None, :], axis=2)


def normal(shares_GPE: Shares) -> Shares:
    """Sums of 1."""
    found: Shares = shares_GPE / shares_GPE.sum(axis=-1, keepdims=True)
    return found


def hot_part(shares_GPE: Shares) -> float:
    """What the hottest experts of each target have, one in ``HOT_ONE_OF``; mean over targets."""
    hot = max(1, shares_GPE.shape[-1] // HOT_ONE_OF)
    return float(np.partition(shares_GPE, -hot, axis=-1)[..., -hot:].sum(axis=-1).mean())


def skew(shares_GPE: Shares, num_workers: int) -> Shares:
    """[G, P] most loaded worker / mean, experts in order on workers, as evenly as their number allows."""
    edges = np.arange(num_workers) * shares_GPE.shape[-1] // num_workers
    loads_GPN = np.add.reduceat(shares_GPE, edges, axis=-1)
    found: Shares = loads_GPN.max(axis=-1) / loads_GPN.mean(axis=-1)
    return found


def hottest(shares_GPE: Shares) -> float:
    """The hottest expert over the mean one, mean over targets."""
    return float(shares_GPE.max(axis=-1).mean() * shares_GPE.shape[-1])


def in_words(shares_GPE: Shares) -> str:
    """How skewed shares are, by the paper's measures."""
    skew_GP = skew(shares_GPE, min(SKEW_WORKERS, shares_GPE.shape[2]))
    return (
        f"one expert in {HOT_ONE_OF} has {hot_part(shares_GPE):.1%}, the hottest {hottest(shares_GPE):.1f} times the mean; most"
        f" loaded of {SKEW_WORKERS} workers {skew_GP.mean():.2f} times the mean, in the worst layer"
        f" {skew_GP.mean(axis=1).max():.2f}"
    )


def bisect(rising: Callable[[float], float], low: float, high: float, *, steps: int = 30) -> float:
    """Where a function that rises crosses zero, as near as its steps allow."""
    for _ in range(steps):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2

"""Random numbers that belong to a request: the t-th draw of a seed is the same wherever and whenever it is made.

Counter-based: no state but the number of tokens generated, so a request that was preempted, moved to another row or
drawn beside others goes on as if it had been alone, and a seed means the same on every device.
"""

import numpy as np
from numpy.typing import NDArray

from kvpager.kinds import MAX_SEED
from kvpager.sampling.params import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], draws: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The `draws`-th number of each seed: seeds [R], draws [R] → [R] in [0, 1), 53 bits each. O(R).

    A seed is mixed before the counter is added, so that the sequences of neighbouring seeds share nothing.
    """
    bits = _mixed(_mixed(seeds) + (draws + np.uint64(1)) * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(params: SamplingParams, engine_seed: int, request_number: int, completion: int = 0) -> int:
    """The seed of one completion of a request.

    Args:
        params: its own seed comes first.
        engine_seed: where it has none.
        request_number: likewise, so that requests without a seed differ.
        completion: index among its n; the first has the seed itself.
    """
    seed = params.seed
    if seed is None:
        seed = (engine_seed * _GOLDEN + request_number + 1) & MAX_SEED
    if completion:
        seed = int(_mixed(np.array([(seed + completion * _GOLDEN) & MAX_SEED], dtype=np.uint64))[0])
    return seed

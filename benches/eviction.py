"""Hit rates of the eviction policies on a trace of its own: `python benches/eviction.py`.

Some prompts come again and again, a few of them most of the time (Zipf over 300), all below one of 20 beginnings; the
rest never comes back (a scan). The pool holds a part of them. Read the columns of one row against each other: tokens
found over tokens asked for, by policy. Nothing is timed, and the numbers are the same on every machine.
"""

import random
from array import array

from kvpager import KVBlockManager

NUM_PROMPTS, NUM_BEGINNINGS, LENGTH = 4000, 20, 6


def make_trace(share_of_scans: float) -> list[list[int]]:
    """Prompts of one-token blocks."""
    rng = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(300)]
    trace, fresh = [], 10_000
    for _ in range(NUM_PROMPTS):
        if rng.random() < share_of_scans:
            fresh += LENGTH
            trace.append([fresh + nth for nth in range(LENGTH)])
        else:
            rank = rng.choices(range(300), weights)[0]
            trace.append([rank % NUM_BEGINNINGS, *(1000 * nth + rank for nth in range(1, LENGTH))])
    return trace


def hit_rate(eviction_policy: str, num_blocks: int, trace: list[list[int]]) -> float:
    """Tokens found over tokens asked for; each prompt is computed, committed and let go."""
    manager = KVBlockManager(num_blocks, 1, enable_prefix_caching=True, eviction_policy=eviction_policy)
    for prompt in trace:
        manager.admit(1, prompt, out=array("q", bytes(8 * len(prompt))))
        manager.commit(1, len(prompt))
        manager.release_sequence(1)
    stats = manager.stats
    return stats.num_hit_tokens / stats.num_queried_tokens


def main() -> None:
    """Print the table."""
    names = KVBlockManager.eviction_policies
    print("scans  blocks" + "".join(f"{name:>9}" for name in names))
    for share_of_scans in (0.0, 0.3, 0.6):
        trace = make_trace(share_of_scans)
        for num_blocks in (64, 200, 400):
            rates = (hit_rate(name, num_blocks, trace) for name in names)
            print(f"{share_of_scans:4.0%} {num_blocks:8}" + "".join(f"{rate:9.1%}" for rate in rates))


if __name__ == "__main__":
    main()

"""Random operations on the Rust manager and its readable twin, for as long as you like: `make soak`.

    PYTHONPATH=python python tools/soak.py [--seconds 600] [--seed 12345]

World after world of 1 to 6 blocks is drawn, and after each operation everything visible is compared, both sides are
audited, and a toy cache is checked, as in `tests/manager/test_differential.py`, whose machinery this is. The seed is
printed; a difference prints the operations that led to it and how to play that one world again.
"""

import argparse
import random
import secrets
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "manager"))

from driver import random_operation, random_world
from test_differential import Pair

OPERATIONS = 300  # of each world


def run_world(seed: int, index: int) -> int:
    """Plays one world to its end; how many operations that were."""
    rng = random.Random(f"{seed} {index}")
    world = random_world(rng, rng.randint(1, 6), rng.choice((1, 2, 4)))
    pair = Pair(world, equal_hashes=rng.random() < 0.2)
    for _ in range(OPERATIONS):
        pair.run(random_operation(rng, pair.reference, pair.shadow))
    return OPERATIONS


def main() -> None:
    """Plays worlds until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long (default 600)")
    parser.add_argument("--seed", type=int, help="repeat a run; drawn if not given")
    parser.add_argument("--world", type=int, help="only this world of the seed")
    arguments = parser.parse_args()
    seed = secrets.randbits(63) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    if arguments.world is not None:
        run_world(seed, arguments.world)
        return
    start, index, operations = time.monotonic(), 0, 0
    while time.monotonic() - start < arguments.seconds:
        try:
            operations += run_world(seed, index)
        except BaseException:
            print(f"\nagain: python tools/soak.py --seed {seed} --world {index}", file=sys.stderr)
            raise
        index += 1
    seconds = time.monotonic() - start
    print(f"{operations:,} operations in {index:,} worlds and {seconds:.0f} s: no difference")


if __name__ == "__main__":
    main()

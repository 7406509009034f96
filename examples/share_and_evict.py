"""What the pool looks like while sequences share, fork, diverge, leave and are evicted.

    python examples/share_and_evict.py                 evicts what was not used for longest
    python examples/share_and_evict.py --policy slru   spares what was hit: a scan of strangers can't flush it

Twelve blocks of four tokens, with the prefix index on. After each step one line shows every block:

    AB*   live: held by sequences A and B; * the index names it, so that an equal prompt can share it
    2     cached: held by nobody, but an equal prompt still finds it; 2 says that two others are evicted before it
    .     free
    !     fenced: held by nobody, but an owed copy still reads it

No model and no tensor is needed: the block manager deals in integers alone. Where an engine would write keys and
values, this calls `commit`, which says that they are written.
"""

import argparse

from kvpager import KVBlockManager
from kvpager.errors import OutOfBlocksError

NUM_BLOCKS, BLOCK_SIZE = 12, 4
NAMES = "ABCDEFGH"
A, B, C, D, E, F = range(6)

VOCABULARY: dict[str, int] = {}


def tokens(text: str) -> list[int]:
    """One id a word, given out in the order in which words are first seen."""
    return [VOCABULARY.setdefault(word, len(VOCABULARY)) for word in text.split()]


SYSTEM = tokens("you are a kind assistant . answer briefly")  # 8 tokens: two blocks
LONG = tokens("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen")


def picture(manager: KVBlockManager) -> str:
    """One cell a block; see the module's docstring."""
    cells = []
    for block in range(manager.num_blocks):
        info = manager.block_info(block)
        if info.state == "live":
            cells.append("".join(NAMES[owner] for owner in info.owners) + "*" * info.is_indexed)
        elif info.state == "cached":
            cells.append(str(info.eviction_rank))
        else:
            cells.append("." if info.state == "free" else "!")
    return "  ".join(cell.ljust(4) for cell in cells).rstrip()


def show(manager: KVBlockManager, title: str, remark: str = "") -> None:
    """Prints a step and the pool after it; an example that breaks an invariant stops."""
    stats = manager.stats
    print(f"{title}\n    {picture(manager)}")
    figures = f"live {stats.live}, cached {stats.cached}, fenced {stats.fenced}, free {stats.free}"
    print(f"    {figures}{remark and '; '}{remark}\n")
    if problems := manager.check_invariants():
        raise RuntimeError("; ".join(problems))


def admit(manager: KVBlockManager, sequence: int, prompt: list[int]) -> str:
    """Admits a prompt and computes what was not cached. Says what the cache saved."""
    admission = manager.admit(sequence, prompt)
    manager.commit(sequence, len(prompt))
    found, wrote = admission.num_computed_tokens, len(admission.slots)
    return f"{found} of {len(prompt)} tokens found, {wrote} computed"


def generate(manager: KVBlockManager, sequence: int, text: str) -> None:
    """Appends tokens one by one, as a decode loop does."""
    for token in tokens(text):
        manager.append_token(sequence, token)
        manager.commit(sequence, manager.sequences[sequence].sequence_length)


def main() -> None:
    """Runs the story."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=("lru", "slru"), default="lru", help="order of eviction")
    policy = parser.parse_args().policy
    manager = KVBlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True, eviction_policy=policy)
    print(f"    {'  '.join(f'{block:<4}' for block in range(NUM_BLOCKS)).rstrip()}   <- block\n")

    remark = admit(manager, A, SYSTEM + tokens("what is paging ?"))
    generate(manager, A, "memory in")
    show(manager, "A asks a question and has two tokens of its answer", remark)

    remark = admit(manager, B, SYSTEM + tokens("why is rust fast ?"))
    show(manager, "B has the same instructions in front: it shares their blocks", remark)

    manager.fork_sequence(A, C)
    show(manager, "C is forked from A, a second answer to the same question: not a block is copied, the tail neither")

    manager.append_token(C, *tokens("blocks"))
    pairs = manager.take_copies()
    manager.commit(C, manager.sequences[C].sequence_length)
    copies = ", ".join(f"block {source} to {destination}" for source, destination in pairs)
    show(manager, "C goes on in its own words: the shared tail is copied before the write", f"copy {copies}")

    generate(manager, A, "fixed pieces")
    generate(manager, C, "of tokens")
    show(manager, "A and C fill their last blocks, which enter the index")

    for sequence in (A, C, B):
        manager.release_sequence(sequence)
    show(manager, "All end. What is indexed stays findable; the answers would be evicted first, the instructions last")

    remark = admit(manager, D, LONG + LONG)
    show(
        manager, "D needs more blocks than are free: the oldest leaves are evicted, never a block under another", remark
    )

    try:
        manager.admit(E, LONG[::-1] + LONG)
    except OutOfBlocksError as refusal:
        show(manager, "E, as long, is refused, and nothing has changed", str(refusal))

    remark = admit(manager, E, SYSTEM + tokens("who made you ?"))
    show(manager, "A short E comes instead: the instructions are still there", remark)

    for sequence in (D, E):
        manager.release_sequence(sequence)
    show(manager, "D and E end")

    for stranger in range(3):
        admit(manager, F, [1000 + 40 * stranger + i for i in range(40)])
        manager.release_sequence(F)
    found = manager.match_prefix(SYSTEM + tokens("hello"))
    verdict = "is gone" if found == 0 else "has stayed, for a block that was hit is protected"
    remark = f"{found} of the instructions' 8 tokens found"
    show(manager, f"Three long strangers pass; what was shared {verdict}", remark)


if __name__ == "__main__":
    main()

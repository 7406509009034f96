"""Paged attention from nothing: a pool, block tables, attention over them, a scheduler, two requests. Only torch.

    python examples/paged_in_400_lines.py

Read it from top to bottom; each part uses the ones above it. It is the lesson, kvpager is the product: what is a loop
here is one batched call there. At the end both requests are decoded again without any cache, and the tokens are equal.

Letters in shapes: T tokens, H query heads, K key/value heads, D numbers per head, S slots per block.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

# 1. The pool --------------------------------------------------------------------------------------------------------
#
# The memory for keys and values is cut into blocks of S slots; a slot holds one token. A sequence takes a block when it
# needs one and gives it back when it ends, so no room is kept for tokens that never come: at most S - 1 slots of a
# sequence are empty, whatever its length. Several sequences may hold one block: the reference count says how many.


class Pool:
    """Who holds which block. Numbers only: the bytes lie elsewhere."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(reversed(range(num_blocks)))  # the last one is handed out next
        self.ref_count = [0] * num_blocks

    def take(self) -> int:
        """A block nobody holds. The caller has looked whether there is one."""
        block = self.free.pop()
        self.ref_count[block] = 1
        return block

    def give_back(self, block: int) -> None:
        """One holder less; nobody left means that the block is free."""
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.free.append(block)


# 2. Sequences and their block tables --------------------------------------------------------------------------------
#
# Position p of a sequence lies in its block number p // S, at offset p % S. The table says which block of the pool that
# is, so neighbours in the text need not be neighbours in memory.


@dataclass
class Sequence:
    """A request on its way.

    Two counters, never mixed: `length` tokens have their keys and values in the pool; `tokens` are those of the prompt
    and those generated. The token generated last is in `tokens`, and in the pool after the next step only.
    """

    name: str
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    table: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def num_left(self) -> int:
        """Tokens that still have to be computed before the next one can be chosen."""
        return len(self.tokens) - self.length

    @property
    def is_finished(self) -> bool:
        """Whether all tokens that were asked for are there."""
        return len(self.tokens) - self.num_prompt_tokens == self.max_new_tokens

    @property
    def new_tokens(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.num_prompt_tokens :]


def blocks_needed(pool: Pool, sequence: Sequence, num_tokens: int) -> int:
    """How many blocks `num_tokens` more tokens of the sequence take from the pool."""
    in_all = math.ceil((sequence.length + num_tokens) / pool.block_size)
    is_copied = sequence.length % pool.block_size > 0 and pool.ref_count[sequence.table[-1]] > 1
    return in_all - len(sequence.table) + int(is_copied)


def append(pool: Pool, storage: "Storage", sequence: Sequence, num_tokens: int) -> list[int]:
    """Makes room for tokens and returns their slots: slot = block * S + offset."""
    slots = []
    for _ in range(num_tokens):
        offset = sequence.length % pool.block_size
        if offset == 0:
            sequence.table.append(pool.take())
        elif pool.ref_count[sequence.table[-1]] > 1:  # someone else reads this block: write into a copy
            shared, own = sequence.table[-1], pool.take()
            storage.copy_block(shared, own)
            sequence.table[-1] = own
            pool.give_back(shared)
        slots.append(sequence.table[-1] * pool.block_size + offset)
        sequence.length += 1
    return slots


def fork(pool: Pool, parent: Sequence, name: str) -> Sequence:
    """A second sequence with the same past. It costs a table, not the keys and values: those are shared."""
    for block in parent.table:
        pool.ref_count[block] += 1
    return Sequence(
        name, list(parent.tokens), parent.num_prompt_tokens, parent.max_new_tokens, list(parent.table), parent.length
    )


def release(pool: Pool, sequence: Sequence) -> None:
    """Gives all blocks back; the tokens stay, so that the sequence can be computed again."""
    for block in reversed(sequence.table):
        pool.give_back(block)
    sequence.table, sequence.length = [], 0


# 3. Keys and values, and attention over blocks ----------------------------------------------------------------------
#
# The pool's bytes: for each layer one tensor of keys and one of values, [blocks, S, K, D]. They start as NaN: a slot
# that is read before it was written would spoil the result, and the check at the end would see it.


class Storage:
    """Keys and values of all blocks, all layers."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.keys = torch.full(shape, torch.nan, dtype=torch.float64)
        self.values = torch.full(shape, torch.nan, dtype=torch.float64)

    def write(self, layer: int, slots: list[int], keys: Tensor, values: Tensor) -> None:
        """Puts keys and values [T, K, D] into their slots."""
        self.keys[layer].flatten(0, 1)[slots] = keys
        self.values[layer].flatten(0, 1)[slots] = values

    def copy_block(self, source: int, target: int) -> None:
        """Copies a block, all layers."""
        for bytes_of_all_layers in (self.keys, self.values):
            bytes_of_all_layers[:, target] = bytes_of_all_layers[:, source]


def paged_attention(query: Tensor, storage: Storage, layer: int, table: list[int], length: int) -> Tensor:
    """One query [H, D] attends to the first `length` positions of a sequence, block after block -> [H, D].

    The softmax over all positions is put together from blocks. Of what was seen so far we keep the largest score m, the
    sum of exp(score - m) and the sum of values with these weights; a block with a larger score scales both sums down.
    (Milakov and Gimelshein 2018; this is what the kernels do, many blocks at once.)
    """
    (H, D), block_size = query.shape, storage.keys.shape[2]
    group = H // storage.keys.shape[3]  # query heads that share a key/value head
    largest = torch.full((H,), -torch.inf, dtype=query.dtype)
    total = torch.zeros(H, dtype=query.dtype)
    mixed = torch.zeros(H, D, dtype=query.dtype)
    for number, block in enumerate(table):
        filled = min(block_size, length - number * block_size)  # positions past the length are not read
        keys = storage.keys[layer, block, :filled].repeat_interleave(group, dim=1)  # [filled, H, D]
        values = storage.values[layer, block, :filled].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", query, keys) / math.sqrt(D)  # [H, filled]
        new_largest = torch.maximum(largest, scores.amax(dim=1))
        weights = torch.exp(scores - new_largest[:, None])
        scale = torch.exp(largest - new_largest)
        total = total * scale + weights.sum(dim=1)
        mixed = mixed * scale[:, None] + torch.einsum("ht,thd->hd", weights, values)
        largest = new_largest
    return mixed / total[:, None]


# 4. A model ---------------------------------------------------------------------------------------------------------
#
# A decoder like Llama's, small and with random weights: what it says means nothing, but every part is there. The tokens
# of all sequences of a step lie in one row, [T]; only attention needs to know who is who.

VOCAB, WIDTH, LAYERS, H, K, D = 97, 32, 2, 4, 2, 8


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: turns each pair (j, j + D/2) of x [T, heads, D] by position * 10000^(-2j/D)."""
    frequencies = 10_000.0 ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angles = (positions[:, None] * frequencies)[:, None, :]  # [T, 1, D/2]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def normed(x: Tensor) -> Tensor:
    """RMSNorm of x [T, WIDTH]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Model:
    """Random weights, float64, so that equal computations give equal tokens."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(columns)

        self.embedding, self.head = weight(VOCAB, WIDTH), weight(VOCAB, WIDTH)
        self.q = [weight(H * D, WIDTH) for _ in range(LAYERS)]
        self.k = [weight(K * D, WIDTH) for _ in range(LAYERS)]
        self.v = [weight(K * D, WIDTH) for _ in range(LAYERS)]
        self.o = [weight(WIDTH, H * D) for _ in range(LAYERS)]
        self.up = [weight(4 * WIDTH, WIDTH) for _ in range(LAYERS)]
        self.down = [weight(WIDTH, 4 * WIDTH) for _ in range(LAYERS)]

    def step(self, work: list["Work"], storage: Storage) -> list[Tensor]:
        """Computes the tokens of each piece of work: writes keys and values, gives the scores after its last token."""
        x = self.embedding[[token for piece in work for token in piece.tokens]]  # [T, WIDTH]
        positions = torch.tensor([piece.start + n for piece in work for n in range(len(piece.tokens))])
        slots = [slot for piece in work for slot in piece.slots]
        for layer in range(LAYERS):
            inputs = normed(x)
            queries = rotate((inputs @ self.q[layer].T).view(-1, H, D), positions)
            keys = rotate((inputs @ self.k[layer].T).view(-1, K, D), positions)
            storage.write(layer, slots, keys, (inputs @ self.v[layer].T).view(-1, K, D))
            attended, row = [], 0
            for piece in work:
                for n in range(len(piece.tokens)):  # a token sees itself and what came before it
                    length = piece.start + n + 1
                    seen = piece.sequence.table[: math.ceil(length / storage.keys.shape[2])]
                    attended.append(paged_attention(queries[row], storage, layer, seen, length))
                    row += 1
            x = x + torch.stack(attended).flatten(1) @ self.o[layer].T
            x = x + torch.relu(normed(x) @ self.up[layer].T) @ self.down[layer].T
        scores = normed(x) @ self.head.T
        ends = torch.tensor([len(piece.tokens) for piece in work]).cumsum(0) - 1
        return list(scores[ends])


# 5. The scheduler ---------------------------------------------------------------------------------------------------
#
# First come, first served. Each step gives every running sequence the tokens it can compute: one if it generates, a
# chunk of its prompt otherwise, while the step's budget lasts. Prompts and generation mix, so nobody waits for a long
# prompt. When the pool is empty, the youngest gives its blocks back and goes to the head of the queue; it computes its
# tokens again later (all of them, the generated ones too) and loses nothing but time.


@dataclass
class Work:
    """What one sequence computes in one step: `tokens` from position `start` on, written to `slots`."""

    sequence: Sequence
    tokens: list[int]
    start: int
    slots: list[int]


class Scheduler:
    """Decides who computes what."""

    def __init__(self, pool: Pool, storage: Storage, max_tokens_per_step: int) -> None:
        self.pool, self.storage, self.budget = pool, storage, max_tokens_per_step
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # oldest first
        self.log: list[str] = []

    def step(self) -> list[Work]:
        """The next step's work; blocks for it are taken."""
        work, budget = [], self.budget
        while budget > 0:
            handled = [piece.sequence for piece in work]
            sequence = next((s for s in self.running if s not in handled), None)
            if sequence is None:
                sequence = self._admit()
            if sequence is None:
                break
            count = min(sequence.num_left, budget)
            if not self._make_room(sequence, count, handled):
                continue  # it was preempted itself
            start = sequence.length
            slots = append(self.pool, self.storage, sequence, count)
            work.append(Work(sequence, sequence.tokens[start : start + count], start, slots))
            budget -= count
        return work

    def _admit(self) -> Sequence | None:
        """Lets the first of the queue in, if all it has to compute fits and leaves a block for the others to grow."""
        if not self.waiting:
            return None
        first, spare = self.waiting[0], 1 if self.running else 0
        if blocks_needed(self.pool, first, first.num_left) + spare > len(self.pool.free):
            return None
        self.running.append(self.waiting.pop(0))
        self.log.append(f"{first.name} enters")
        return first

    def _make_room(self, sequence: Sequence, count: int, handled: list[Sequence]) -> bool:
        """Preempts the youngest until there is room. Whoever has its place in this step keeps it: it is older."""
        while blocks_needed(self.pool, sequence, count) > len(self.pool.free):
            victim = self.running.pop()
            assert victim not in handled, "the oldest sequence alone must fit the pool"
            release(self.pool, victim)
            self.waiting.insert(0, victim)
            self.log.append(f"{victim.name} is preempted")
            if victim is sequence:
                return False
        return True

    def finish(self, sequence: Sequence) -> None:
        """A sequence has all its tokens."""
        release(self.pool, sequence)
        self.running.remove(sequence)
        self.log.append(f"{sequence.name} ends")


# 6. The engine: step by step until nobody is left -------------------------------------------------------------------


def run(model: Model, scheduler: Scheduler, *, show: bool = True) -> int:
    """Runs all requests to their end; returns the number of steps."""
    steps = 0
    while scheduler.waiting or scheduler.running:
        scheduler.log.clear()
        work = scheduler.step()
        assert work, "a request that can never fit must be refused before it is queued"
        for piece, scores in zip(work, model.step(work, scheduler.storage), strict=True):
            if piece.sequence.num_left == 0:  # its newest token is computed: choose the next one
                piece.sequence.tokens.append(int(scores.argmax()))
        if show:
            print(f"step {steps:2}  {pool_map(scheduler)}  {what_happened(work, scheduler.log)}")
        for piece in work:
            if piece.sequence.is_finished:
                scheduler.finish(piece.sequence)
        steps += 1
    return steps


def pool_map(scheduler: Scheduler) -> str:
    """One letter a block: its holder, a dot if it is free, a star if several hold it."""
    letters = ["." for _ in scheduler.pool.ref_count]
    for sequence in scheduler.running:
        for block in sequence.table:
            letters[block] = "*" if scheduler.pool.ref_count[block] > 1 else sequence.name
    return "".join(letters)


def what_happened(work: list[Work], log: list[str]) -> str:
    """A step in words: who came and went, and which positions were computed."""
    computed = ", ".join(f"{p.sequence.name} {p.start}..{p.start + len(p.tokens) - 1}" for p in work)
    return "; ".join([*log, f"computes {computed}"])


def without_cache(model: Model, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The same answer the slow way: for each token everything is computed anew, in one block of its own."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        pool = Pool(num_blocks=1, block_size=len(tokens))
        storage = Storage(LAYERS, 1, len(tokens), K, D)
        solo = Sequence("solo", tokens, len(prompt), max_new_tokens)
        work = Work(solo, tokens, 0, append(pool, storage, solo, len(tokens)))
        (scores,) = model.step([work], storage)
        tokens = [*tokens, int(scores.argmax())]
    return tokens[len(prompt) :]


def two_requests(model: Model) -> None:
    """A and B in a pool that is too small for both at their full length."""
    print("two requests, 8 blocks of 4 slots, at most 6 tokens a step\n")
    pool, storage = Pool(num_blocks=8, block_size=4), Storage(LAYERS, 8, 4, K, D)
    scheduler = Scheduler(pool, storage, max_tokens_per_step=6)
    prompts = {"A": [5, 17, 3, 42, 8, 23, 61, 2, 77], "B": [11, 4, 9, 30, 71]}
    requests = [Sequence(name, list(prompt), len(prompt), 14) for name, prompt in prompts.items()]
    scheduler.waiting.extend(requests)
    run(model, scheduler)
    assert len(pool.free) == 8, "every block came back"
    for request in requests:
        assert request.new_tokens == without_cache(model, prompts[request.name], 14)
        print(f"{request.name}: {request.new_tokens} as without a cache")


def one_prompt_two_ways(model: Model) -> None:
    """A fork: two continuations share the blocks of their common past until one of them writes into a shared block."""
    print("\na fork: C goes on twice, the second time after another first token\n")
    pool, storage = Pool(num_blocks=8, block_size=4), Storage(LAYERS, 8, 4, K, D)
    scheduler = Scheduler(pool, storage, max_tokens_per_step=16)
    prompt = [7, 7, 1, 90, 33, 21]
    parent = Sequence("C", list(prompt), len(prompt), 6)
    scheduler.waiting.append(parent)
    (work,) = scheduler.step()
    (scores,) = model.step([work], storage)
    best, second = scores.topk(2).indices.tolist()
    child = fork(pool, parent, "D")
    parent.tokens.append(best)
    child.tokens.append(second)
    scheduler.running.append(child)
    print(f"        {pool_map(scheduler)}  shared by both: *")
    run(model, scheduler)
    for request, first in ((parent, best), (child, second)):
        assert request.new_tokens == [first, *without_cache(model, [*prompt, first], 5)]
        print(f"{request.name}: {request.new_tokens} as without a cache")


if __name__ == "__main__":
    two_requests(Model())
    one_prompt_two_ways(Model())

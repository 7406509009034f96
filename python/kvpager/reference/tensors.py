"""The batched calls: one row for each id, in the order of `ids`; the answers are tensors or the caller's buffers."""

from typing import Any

from kvpager.errors import ArgumentError
from kvpager.reference.appending import Appending
from kvpager.reference.arguments import ID, describe, num_elements, read_natural, read_naturals
from kvpager.reference.buffers import open_target
from kvpager.reference.questions import Questions

MAX_ENTRIES = 2**31 - 1  # of all rows of a table: int32 reaches them all


class TensorFace(Appending, Questions):
    """The calls of the block manager that give tensors: one row for each id, in the order of `ids`."""

    def slot_mapping_for_append(
        self, ids: Any, counts: Any = None, token_ids: Any = None, *, device: Any = None, out: Any = None
    ) -> Any:
        """Append `counts[row]` tokens (default 1) to each sequence; their slots as int64 [T]. O(T).

        `token_ids`: the ids of all T tokens, row after row, if they are known.
        """
        runs = self._read_runs(ids, counts, token_ids)
        self._check_runs(runs, "token_ids", batched=True)
        target = open_target(out, device, "int64", (sum(run.count for run in runs),))  # the last thing that can fail
        return target.fill(self._append_runs(runs))

    def get_block_table_tensor(
        self, ids: Any, max_blocks: int | None = None, *, device: Any = None, out: Any = None
    ) -> Any:
        """Block tables as int32 [B, M], rows padded with -1. O(B * M).

        M is `max_blocks`; if that is None, what `out` has room for, or else the longest table.
        """
        tables = [self.block_table(sequence_id) for sequence_id in read_naturals("ids", ids, ID)]
        longest = max(map(len, tables), default=0)
        width = longest
        if max_blocks is not None:
            most = max(MAX_ENTRIES // max(len(tables), 1), longest)
            wanted = f"{longest} (the longest table) to {most}"
            width = read_natural("max_blocks", max_blocks, wanted, most)
            if width < longest:
                raise ArgumentError("max_blocks", wanted, width)
        elif out is not None and tables:
            width = num_elements(out) // len(tables)
            if width < longest:
                raise ArgumentError("out", f"room for {longest} blocks in a row, the longest table", describe(out))
        target = open_target(out, device, "int32", (len(tables), width) if tables else (0, 0))
        return target.fill([block for table in tables for block in table + [-1] * (width - len(table))])

    def get_seq_lens_tensor(self, ids: Any, *, device: Any = None, out: Any = None) -> Any:
        """Sequence lengths as int32 [B]. O(B)."""
        lengths = [self.sequence_length(sequence_id) for sequence_id in read_naturals("ids", ids, ID)]
        return open_target(out, device, "int32", (len(lengths),)).fill(lengths)

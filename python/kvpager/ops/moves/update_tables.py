"""`update_tables`: the changed entries of a block table that a device keeps."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.op import Op
from kvpager.ops.tensors import check_ints, check_written, refuse


def _check(block_tables: Tensor, changed: Tensor) -> None:
    """Metadata of `update_tables`: a table and the list of its changes beside it."""
    check_ints("block_tables", block_tables, torch.int32, 2, "[B, M]", block_tables.device)
    check_ints("changed", changed, torch.int32, 2, "[C, 3]", block_tables.device)
    if changed.shape[1] != 3:
        refuse("changed", "[C, 3] (row, column, block)", changed)
    check_written("block_tables", block_tables)


def _check_change_values(changed: list[list[int]], num_rows: int, num_columns: int) -> None:
    """Every entry names a place of the table, or row −1, which is padding. O(C)."""
    for index, (row, column, _) in enumerate(changed):
        if row != -1 and not (0 <= row < num_rows and 0 <= column < num_columns):
            wanted = f"rows below {num_rows} (or -1) and columns below {num_columns}"
            raise ArgumentError("changed", wanted, f"row {row}, column {column} at entry {index}")


def _reference(block_tables: Tensor, changed: Tensor) -> None:
    _check_change_values(changed.tolist(), *block_tables.shape)
    rows, columns, blocks = changed[changed[:, 0] >= 0].unbind(1)
    block_tables[rows, columns] = blocks


_UPDATE_TABLES = Op("update_tables", "(Tensor(a!) block_tables, Tensor changed) -> ()", _check, _reference)


def update_tables(block_tables: Tensor, changed: Tensor) -> None:
    """Write the changed entries of a block table: what a step of `DecodeBatch` lists, where the device keeps the table.

    Args:
        block_tables: block_tables [B, M] int32, any strides; written.
        changed: changed [C, 3] int32 on the same device: (row, column, block), no place twice. Entries whose row is −1
            are padding, so that a captured graph can take a list of fixed size.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or a row or column lies outside the table; nothing is
            written then.

    O(C), whatever the size of the table.
    """
    _UPDATE_TABLES(block_tables, changed)

//! The methods of the class that show many sequences to kernels: their tables and lengths, in new tensors or in the
//! caller's memory.

use kvpager_core::{Error, SequenceId};
use pyo3::prelude::*;

use crate::arguments::read_natural;
use crate::arrays::Arrays;
use crate::failure::argument_error;
use crate::manager::KVBlockManager;
use crate::out::{Out, fill_new, refuse_device};

/// A table entry is copied in the time that a sixteenth of an append takes.
const ENTRIES_PER_TOKEN: usize = 16;

/// Most entries of all rows of a table: int32 reaches them all. That is 8 GiB, far beyond what any batch of any model is
/// padded to, and so many blocks a pool can have; above it there are only slips.
const MAX_ENTRIES: u64 = i32::MAX as u64;

/// The parameter `max_blocks`, if no table of the `num_rows` is longer.
fn read_width(max_blocks: &Bound<'_, PyAny>, longest: usize, num_rows: usize) -> PyResult<usize> {
    let most = (MAX_ENTRIES / num_rows.max(1) as u64).max(longest as u64);
    let wanted = format!("{longest} (the longest table) to {most}");
    let width = read_natural(max_blocks, "max_blocks", &wanted)?;
    if width < longest as u64 || width > most {
        return Err(argument_error("max_blocks", &wanted, width.to_string()));
    }
    Ok(width as usize)
}

/// An `out` of which every row has the same number of entries.
#[inline]
fn open_rows<'a, 'py>(out: &'a Bound<'py, PyAny>, num_rows: usize) -> PyResult<Out<'a, 'py, i32>> {
    let wanted = || format!("a writable, contiguous int32 buffer of {num_rows} rows on the CPU");
    let target = Out::open(out, wanted)?;
    let rows_fit = match target.rows_of_two() {
        Some(rows) => rows == num_rows,
        None => target.len().is_multiple_of(num_rows),
    };
    if rows_fit { Ok(target) } else { Err(argument_error("out", &wanted(), target.describe())) }
}

impl KVBlockManager {
    /// Entries of the longest table among `ids`.
    fn longest_table(&self, py: Python<'_>, ids: &[SequenceId]) -> PyResult<usize> {
        self.call(py, ids.len() as u64, |manager| manager.longest_table(ids))
    }

    /// Writes tables to `out`, in rows of `width` entries; `None`: of as many as it has room for.
    #[inline]
    fn write_tables(&self, ids: &[SequenceId], width: Option<usize>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = out.py();
        let target = match width {
            Some(width) => Out::open_exact(out, "int32", (ids.len() as u64).saturating_mul(width as u64)),
            None => open_rows(out, ids.len()),
        };
        let target = match target {
            Ok(target) => target,
            Err(about_out) => {
                self.longest_table(py, ids)?; // unknown ids are said first
                return Err(about_out);
            }
        };
        let max_blocks = width.or(target.len().checked_div(ids.len())).unwrap_or(0);
        let work = (target.len() / ENTRIES_PER_TOKEN) as u64;
        let too_long = self.call_into(py, work, target, |manager, out| {
            match manager.write_block_tables(ids, max_blocks, out) {
                Err(Error::Argument { argument: "max_blocks", .. }) if width.is_none() => {
                    manager.longest_table(ids).map(Some)
                }
                written => written.map(|()| None),
            }
        })?;
        let Some(longest) = too_long else { return Ok(()) };
        let wanted = format!("room for {longest} blocks in a row, the longest table");
        Err(argument_error("out", &wanted, Out::<i32>::open(out, || wanted.clone())?.describe()))
    }

    /// The tables in a new tensor.
    fn tables_in_new<'py>(
        &self,
        py: Python<'py>,
        ids: &[SequenceId],
        max_blocks: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        loop {
            let longest = self.longest_table(py, ids)?;
            let width =
                max_blocks.map_or(Ok(longest), |max_blocks| read_width(max_blocks, longest, ids.len()))?;
            let shape = if ids.is_empty() { [0, 0] } else { [ids.len() as u64, width as u64] };
            let tables =
                fill_new(py, &shape, "int32", device, |tables| self.write_tables(ids, Some(width), tables));
            // If another thread made a table longer in between, it is measured again.
            if tables.is_ok() || max_blocks.is_some() || self.longest_table(py, ids)? <= width {
                return tables;
            }
        }
    }
}

#[pymethods]
impl KVBlockManager {
    /// Export block tables, a snapshot: logical block -> physical block, one row for each id.
    ///
    /// Args:
    ///     ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or an iterable of ints.
    ///     `max_blocks`: M, entries in a row; B * M is at most 2^31 - 1. None: what `out` has room for, else the longest
    ///         table.
    ///     device: device of the new tensor; the CPU if None. Not together with `out`.
    ///     out: writable C-contiguous int32 buffer of exactly B * M elements; filled and returned itself.
    ///
    /// Returns:
    ///     `block_tables [B, M] int32`, rows padded with -1; an empty batch has shape [0, 0]. `out` if it was given.
    ///
    /// Raises:
    ///     `UnknownSequenceError`: an id names no sequence.
    ///     `ArgumentError`: `max_blocks` is below the longest table or far too large; a bad id, `out` or `device`.
    ///
    /// Cost: O(B * M).
    #[pyo3(signature = (ids, max_blocks = None, *, device = None, out = None))]
    fn get_block_table_tensor<'py>(
        &self,
        ids: &Bound<'py, PyAny>,
        max_blocks: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = ids.py();
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            let ids = arrays.ids.as_slice();
            let Some(out) = out else { return self.tables_in_new(py, ids, max_blocks, device) };
            refuse_device(device)?;
            let read = |max_blocks| read_width(max_blocks, self.longest_table(py, ids)?, ids.len());
            self.write_tables(ids, max_blocks.map(read).transpose()?, out)?;
            Ok(out.clone())
        })
    }

    /// Export sequence lengths, a snapshot: tokens that own a slot.
    ///
    /// Args:
    ///     ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or an iterable of ints.
    ///     device: device of the new tensor; the CPU if None. Not together with `out`.
    ///     out: writable C-contiguous int32 buffer of exactly B elements; filled and returned itself.
    ///
    /// Returns:
    ///     `seq_lens [B] int32`; `out` if it was given.
    ///
    /// Raises:
    ///     `UnknownSequenceError`: an id names no sequence.
    ///     `ArgumentError`: a bad id, `out` or `device`.
    ///
    /// Cost: O(B).
    #[pyo3(signature = (ids, *, device = None, out = None))]
    fn get_seq_lens_tensor<'py>(
        &self,
        ids: &Bound<'py, PyAny>,
        device: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            if let Some(out) = out {
                refuse_device(device)?;
                self.write_lengths(arrays, out)?;
                return Ok(out.clone());
            }
            let shape = [arrays.ids.len() as u64];
            fill_new(ids.py(), &shape, "int32", device, |lengths| self.write_lengths(arrays, lengths))
        })
    }
}

impl KVBlockManager {
    #[inline]
    fn write_lengths(&self, arrays: &mut Arrays, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = out.py();
        let Arrays { ids, entries, .. } = arrays;
        let work = ids.len() as u64;
        let target = match Out::open_exact(out, "int32", work) {
            Ok(target) => target,
            Err(about_out) => {
                self.longest_table(py, ids)?; // unknown ids are said first
                return Err(about_out);
            }
        };
        self.call_into(py, work, target, |manager, out| {
            entries.resize(ids.len(), 0);
            manager.write_seq_lens(ids, entries)?;
            out.copy_from_slice(entries);
            Ok(())
        })
    }
}

//! The methods of the class about many sequences at once: one crossing a step, buffers in and out.

use kvpager_core::{Error, SequenceId, Slot, TokenId};
use pyo3::prelude::*;

use crate::arguments::read_natural;
use crate::arrays::{read_counts, read_ids, read_token_ids};
use crate::buffers::Out;
use crate::failure::argument_error;
use crate::manager::KVBlockManager;
use crate::tensors::{fill_new, refuse_device};

/// A table entry is copied in the time that a sixteenth of an append takes.
const ENTRIES_PER_TOKEN: usize = 16;

/// Most entries of all rows of a table: int32 reaches them all. That is 8 GiB, far beyond what any batch of any model
/// is padded to, and so many blocks a pool can have; above it there are only slips.
const MAX_ENTRIES: u64 = i32::MAX as u64;

/// The arguments of a batched append.
struct Append {
    ids: Vec<SequenceId>,
    counts: Option<Vec<u64>>,
    token_ids: Option<Vec<TokenId>>,
}

impl Append {
    fn read(
        ids: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let ids = read_ids(ids)?;
        let counts = counts.map(|counts| read_counts(counts, "counts")).transpose()?;
        let token_ids = token_ids.map(read_token_ids).transpose()?;
        if let Some(counts) = counts.as_ref().filter(|counts| counts.len() != ids.len()) {
            let wanted = format!("one count for each of {} ids", ids.len());
            return Err(argument_error("counts", &wanted, format!("{} counts", counts.len())));
        }
        Ok(Self { ids, counts, token_ids })
    }

    fn num_tokens(&self) -> u64 {
        let counts = self.counts.as_ref();
        counts.map_or(self.ids.len() as u64, |counts| counts.iter().fold(0, |sum, &n| sum.saturating_add(n)))
    }

    #[inline]
    fn run(&self, py: Python<'_>, manager: &KVBlockManager) -> PyResult<Vec<Slot>> {
        manager.call(py, self.num_tokens(), |manager| {
            let (ids, counts, mut slots) = (&self.ids, self.counts.as_deref(), Vec::new());
            manager.append_batch(ids, counts, self.token_ids.as_deref(), &mut slots)?;
            Ok(slots)
        })
    }

    #[inline]
    fn run_into(&self, manager: &KVBlockManager, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let target = Out::open_exact(out, "int64", self.num_tokens()).or_else(|about_out| {
            // What is wrong with the batch itself is said first.
            manager.call(out.py(), self.num_tokens(), |manager| {
                manager.settle_batch(&self.ids, self.counts.as_deref(), self.token_ids.as_deref())
            })?;
            Err(about_out)
        })?;
        target.write(out.py(), &self.run(out.py(), manager)?);
        Ok(())
    }
}

#[pymethods]
impl KVBlockManager {
    /// Append to a batch of sequences, in the order of `ids`, and return where the new tokens' K/V go.
    ///
    /// All or nothing: the demand of the whole batch is settled before anything changes. An id named twice appends
    /// twice. Appending into a shared tail block owes a copy: run `take_copies` before the slots are written. Fastest
    /// with `ids` (and `counts`) in int64 arrays or tensors on the CPU and a reused `out`.
    ///
    /// Args: ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or an iterable of
    /// ints. counts: `counts [B]`, tokens to append to each (0 allowed), of the same kinds; None appends one to each.
    /// `token_ids`: `token_ids [T]`, ids of the new tokens, row after row, of the same kinds; None: told later, with
    /// `commit`, or known from the prompt. device: device of the new tensor; the CPU if None. Not together with `out`.
    /// out: writable C-contiguous int64 buffer of exactly T elements (CPU tensor, numpy array, `array`, memoryview);
    /// filled and returned itself.
    ///
    /// Returns:
    ///     `slot_mapping [T] int64`, T = sum of `counts`: the rows' slots one after the other; `out` if it was given.
    ///
    /// Raises:
    ///     `UnknownSequenceError`: an id names no sequence.
    ///     `OutOfBlocksError`: the pool has fewer free blocks than the batch takes; `row` is the first that lacks one.
    ///     `SequenceTooLongError`: a sequence would have more tokens than `max_sequence_length`.
    ///     `ArgumentError`: a bad id, count, token id (another than the prompt's, for example), `out` or `device`.
    ///
    /// Cost: O(B + T); one crossing into Rust, no work in Python per row.
    #[pyo3(signature = (ids, counts = None, token_ids = None, *, device = None, out = None))]
    fn slot_mapping_for_append<'py>(
        &self,
        ids: &Bound<'py, PyAny>,
        counts: Option<&Bound<'py, PyAny>>,
        token_ids: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let append = Append::read(ids, counts, token_ids)?;
        if let Some(out) = out {
            refuse_device(device)?;
            append.run_into(self, out)?;
            return Ok(out.clone());
        }
        if append.num_tokens() > self.num_slots() {
            append.run(ids.py(), self)?; // refused, before so large a tensor is made
        }
        fill_new(ids.py(), &[append.num_tokens()], "int64", device, |slots| append.run_into(self, slots))
    }

    /// Commit a batch: the first `ns[row]` tokens of each of `ids` are written. `token_ids` are those of all rows'
    /// positions not known yet, one row after the other. All rows or none. O(B + ids + blocks that became full).
    #[pyo3(signature = (ids, ns, token_ids = None))]
    fn commit_batch(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        ns: &Bound<'_, PyAny>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (ids, ns) = (read_ids(ids)?, read_counts(ns, "ns")?);
        let token_ids = token_ids.map(read_token_ids).transpose()?;
        let work = ids.len() + token_ids.as_ref().map_or(0, Vec::len);
        self.call(py, work as u64, |manager| manager.commit_batch(&ids, &ns, token_ids.as_deref()))
    }

    /// Export block tables, a snapshot: logical block -> physical block, one row for each id.
    ///
    /// Args: ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or an iterable of
    /// ints. `max_blocks`: M, entries in a row; B * M is at most 2^31 - 1. None: what `out` has room for, else the
    /// longest table. device: device of the new tensor; the CPU if None. Not together with `out`. out: writable
    /// C-contiguous int32 buffer of exactly B * M elements; filled and returned itself.
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
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        max_blocks: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ids = read_ids(ids)?;
        if let Some(out) = out {
            refuse_device(device)?;
            let read = |max_blocks| read_width(max_blocks, self.longest_table(py, &ids)?, ids.len());
            self.write_tables(&ids, max_blocks.map(read).transpose()?, out)?;
            return Ok(out.clone());
        }
        loop {
            let longest = self.longest_table(py, &ids)?;
            let width = max_blocks.map_or(Ok(longest), |given| read_width(given, longest, ids.len()))?;
            let shape = if ids.is_empty() { [0, 0] } else { [ids.len() as u64, width as u64] };
            let fill = |tables: &Bound<'py, PyAny>| self.write_tables(&ids, Some(width), tables);
            let tables = fill_new(py, &shape, "int32", device, fill);
            // If another thread made a table longer in between, it is measured again.
            if tables.is_ok() || max_blocks.is_some() || self.longest_table(py, &ids)? <= width {
                return tables;
            }
        }
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
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        device: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ids = read_ids(ids)?;
        let num_rows = ids.len() as u64;
        let write = |lengths: &Bound<'py, PyAny>| {
            let target = Out::open_exact(lengths, "int32", num_rows)?;
            let mut entries = vec![0; ids.len()];
            self.call(py, num_rows, |manager| manager.write_seq_lens(&ids, &mut entries))?;
            target.write(py, &entries);
            Ok(())
        };
        let Some(out) = out else { return fill_new(py, &[num_rows], "int32", device, write) };
        refuse_device(device)?;
        write(out)?;
        Ok(out.clone())
    }
}

impl KVBlockManager {
    /// Entries of the longest table among `ids`.
    fn longest_table(&self, py: Python<'_>, ids: &[SequenceId]) -> PyResult<usize> {
        self.call(py, ids.len() as u64, |manager| manager.longest_table(ids))
    }

    /// Writes tables to `out`, in rows of `width` entries; `None`: of as many as it has room for.
    #[inline]
    fn write_tables(&self, ids: &[SequenceId], width: Option<usize>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let target = match width {
            Some(width) => Out::open_exact(out, "int32", ids.len() as u64 * width as u64)?,
            None => open_rows(out, ids.len())?,
        };
        let max_blocks = width.or(target.len().checked_div(ids.len())).unwrap_or(0);
        self.call(out.py(), (target.len() / ENTRIES_PER_TOKEN) as u64, |manager| {
            // SAFETY: under the lock, and after it was opened, nobody else here has a slice over this memory.
            match manager.write_block_tables(ids, max_blocks, unsafe { target.slice() }) {
                Err(Error::Argument { argument: "max_blocks", .. }) if width.is_none() => {
                    let longest = manager.longest_table(ids)?;
                    Err(target.too_small(format!("room for {longest} blocks in a row, the longest table")))
                }
                written => written,
            }
        })
    }
}

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
fn open_rows(out: &Bound<'_, PyAny>, num_rows: usize) -> PyResult<Out<i32>> {
    let wanted = || format!("a writable, contiguous int32 buffer of {num_rows} rows on the CPU");
    Out::open("out", out, wanted, |shape| match *shape {
        [rows, _] => rows == num_rows,
        _ => shape.iter().product::<usize>().is_multiple_of(num_rows),
    })
}

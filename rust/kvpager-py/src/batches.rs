//! The methods of the class about many sequences at once: one crossing a step, buffers in and out.

use kvpager_core::Error;
use pyo3::prelude::*;

use crate::arrays::Arrays;
use crate::failure::argument_error;
use crate::manager::KVBlockManager;
use crate::memory::as_block_ids;
use crate::out::Out;

/// A table entry is copied in the time that a sixteenth of an append takes.
const ENTRIES_PER_TOKEN: usize = 16;

/// Tokens that a batched append would append.
fn count_tokens(arrays: &Arrays, has_counts: bool) -> PyResult<u64> {
    if !has_counts {
        return Ok(arrays.ids.len() as u64);
    }
    if arrays.counts.len() != arrays.ids.len() {
        let wanted = format!("one count for each of {} ids", arrays.ids.len());
        return Err(argument_error("counts", &wanted, format!("{} counts", arrays.counts.len())));
    }
    Ok(arrays.counts.iter().fold(0, |sum, &count| sum.saturating_add(count)))
}

#[pymethods]
impl KVBlockManager {
    /// Append `counts[row]` tokens (default 1) to each of `ids`, in order, and write their slots to `out`, a writable
    /// int64 buffer of exactly that many elements. `token_ids` has one id for each new token. All rows or none.
    /// O(tokens).
    #[pyo3(signature = (ids, counts, out, token_ids = None))]
    fn slot_mapping_into(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            counts.map(|counts| arrays.read_counts(counts)).transpose()?;
            token_ids.map(|token_ids| arrays.read_token_ids(token_ids)).transpose()?;
            let num_tokens = count_tokens(arrays, counts.is_some())?;
            let Arrays { ids, counts: kept_counts, token_ids: kept_ids, slots, .. } = arrays;
            let counts = counts.is_some().then_some(kept_counts.as_slice());
            let token_ids = token_ids.is_some().then_some(kept_ids.as_slice());
            let target = match Out::open_exact(out, "int64", num_tokens) {
                Ok(target) => target,
                Err(about_out) => {
                    // What is wrong with the batch itself is said first.
                    self.call(py, num_tokens, |manager| manager.settle_batch(ids, counts, token_ids))?;
                    return Err(about_out);
                }
            };
            self.call_into(py, num_tokens, target, |manager, out| {
                slots.clear();
                match token_ids {
                    None => manager.append_batch(ids, counts, slots)?,
                    Some(token_ids) => manager.append_batch_ids(ids, counts, token_ids, slots)?,
                }
                out.copy_from_slice(slots);
                Ok(())
            })
        })
    }

    /// Commit a batch: the first `ns[row]` tokens of each of `ids` are written. `token_ids` are those of all rows'
    /// positions not known yet, one row after the other. All rows or none. O(B + ids + blocks that became full).
    #[pyo3(signature = (ids, ns, token_ids = None))]
    fn commit_batch(
        &self,
        ids: &Bound<'_, PyAny>,
        ns: &Bound<'_, PyAny>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = ids.py();
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            arrays.read_lengths(ns)?;
            token_ids.map(|token_ids| arrays.read_token_ids(token_ids)).transpose()?;
            let Arrays { ids, counts: ns, token_ids: kept_ids, .. } = arrays;
            let token_ids = token_ids.is_some().then_some(kept_ids.as_slice());
            let work = ids.len() + token_ids.map_or(0, <[_]>::len);
            self.call(py, work as u64, |manager| manager.commit_batch(ids, ns, token_ids))
        })
    }

    /// How many slots `slot_mapping_into` would write for these arguments. O(ids).
    #[pyo3(signature = (ids, counts = None))]
    fn count_new_tokens(&self, ids: &Bound<'_, PyAny>, counts: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            counts.map(|counts| arrays.read_counts(counts)).transpose()?;
            count_tokens(arrays, counts.is_some())
        })
    }

    /// Entries of the longest block table among `ids`; 0 if there are none. O(ids).
    fn longest_table(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            let ids = &arrays.ids;
            self.call(py, ids.len() as u64, |manager| manager.longest_table(ids))
        })
    }

    /// Write the block tables of `ids` to `out`, a writable int32 buffer `[B, M]`; rows are padded with -1. O(B * M).
    fn block_tables_into(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            let ids = &arrays.ids;
            let wanted = || format!("a writable, contiguous int32 buffer of {} rows on the CPU", ids.len());
            let target = Out::open(out, wanted).and_then(|target| {
                let rows_fit = match target.rows_of_two() {
                    Some(num_rows) => num_rows == ids.len(),
                    None => target.len().is_multiple_of(ids.len()),
                };
                if rows_fit { Ok(target) } else { Err(argument_error("out", &wanted(), target.describe())) }
            });
            let target = match target {
                Ok(target) => target,
                Err(about_out) => {
                    // Unknown ids are said first.
                    self.call(py, ids.len() as u64, |manager| manager.longest_table(ids))?;
                    return Err(about_out);
                }
            };
            let max_blocks = target.len().checked_div(ids.len()).unwrap_or(0);
            let work = (target.len() / ENTRIES_PER_TOKEN) as u64;
            let too_long = self.call_into(py, work, target, |manager, out| {
                match manager.copy_block_tables(ids, max_blocks, as_block_ids(out)) {
                    Err(Error::Argument { argument: "max_blocks", .. }) => {
                        manager.longest_table(ids).map(Some)
                    }
                    written => written.map(|()| None),
                }
            })?;
            let Some(longest) = too_long else { return Ok(()) };
            let wanted = format!("room for {longest} blocks in a row, the longest table");
            Err(argument_error("out", &wanted, Out::<i32>::open(out, || wanted.clone())?.describe()))
        })
    }

    /// Write the lengths of `ids` to `out`, a writable int32 buffer `[B]`. O(B).
    fn seq_lens_into(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            let Arrays { ids, entries, .. } = arrays;
            let work = ids.len() as u64;
            let target = match Out::open_exact(out, "int32", work) {
                Ok(target) => target,
                Err(about_out) => {
                    self.call(py, work, |manager| manager.longest_table(ids))?; // unknown ids are said first
                    return Err(about_out);
                }
            };
            self.call_into(py, work, target, |manager, out| {
                entries.resize(ids.len(), 0);
                manager.write_seq_lens(ids, entries)?;
                out.copy_from_slice(entries);
                Ok(())
            })
        })
    }
}

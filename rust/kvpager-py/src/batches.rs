//! The methods of the class that change many sequences at once: one crossing a step, buffers in and out.

use pyo3::prelude::*;

use crate::arrays::Arrays;
use crate::failure::argument_error;
use crate::manager::KVBlockManager;
use crate::out::{Out, fill_new, refuse_device};

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

impl KVBlockManager {
    /// Appends what `arrays` says and writes the slots to `out`.
    #[inline]
    fn append_into(
        &self,
        arrays: &mut Arrays,
        (has_counts, has_token_ids): (bool, bool),
        num_tokens: u64,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = out.py();
        let Arrays { ids, counts, token_ids, slots, .. } = arrays;
        let counts = has_counts.then_some(counts.as_slice());
        let token_ids = has_token_ids.then_some(token_ids.as_slice());
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
            manager.append_batch(ids, counts, token_ids, slots)?;
            out.copy_from_slice(slots);
            Ok(())
        })
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
    /// Args:
    ///     ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or an iterable of ints.
    ///     counts: `counts [B]`, tokens to append to each (0 allowed), of the same kinds; None appends one to each.
    ///     `token_ids`: `token_ids [T]`, ids of the new tokens, row after row, of the same kinds; None: told later, with
    ///         `commit`, or known from the prompt.
    ///     device: device of the new tensor; the CPU if None. Not together with `out`.
    ///     out: writable C-contiguous int64 buffer of exactly T elements (CPU tensor, numpy array, `array`,
    ///         memoryview); filled and returned itself.
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
        self.with_arrays(|arrays| {
            arrays.read_ids(ids)?;
            counts.map(|counts| arrays.read_counts(counts)).transpose()?;
            token_ids.map(|token_ids| arrays.read_token_ids(token_ids)).transpose()?;
            let given = (counts.is_some(), token_ids.is_some());
            let num_tokens = count_tokens(arrays, counts.is_some())?;
            if let Some(out) = out {
                refuse_device(device)?;
                self.append_into(arrays, given, num_tokens, out)?;
                return Ok(out.clone());
            }
            // What will be refused gets no memory.
            let room = u64::from(self.config.num_blocks()) * self.config.block_size();
            let shape = [if num_tokens <= room { num_tokens } else { 0 }];
            fill_new(ids.py(), &shape, "int64", device, |slots| {
                self.append_into(arrays, given, num_tokens, slots)
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
}

//! The class of a batch that persists from step to step. It lives in its manager, under the manager's lock.

use kvpager_core::{BatchId, BatchShape};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::answers::BatchStep;
use crate::arguments::{read_sequence_id, wrong_kind};
use crate::arrays::{read_counts, read_token_ids};
use crate::lent::BufferSets;
use crate::manager::KVBlockManager;

/// Rows of sequences that step together, shown in two caller-owned buffer sets that take turns.
///
/// `kvpager.DecodeBatch` adds the making of tensors. `first` and `second` have the attributes `block_tables` int32
/// `[B, M]`, `seq_lens` int32 `[B]`, `query_start_loc` int32 `[B+1]`, `slot_mapping` int64 `[T]`, `changed` int32
/// `[C, 3]`: writable contiguous buffers or CPU tensors, held for as long as the batch lives.
#[pyclass(frozen, subclass, module = "kvpager._core")]
pub(crate) struct DecodeBatch {
    manager: Py<KVBlockManager>,
    batch: BatchId,
    shape: BatchShape,
    sets: BufferSets,
}

#[pymethods]
impl DecodeBatch {
    #[new]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = read_manager)] manager: Py<KVBlockManager>,
        first: &Bound<'_, PyAny>,
        second: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let sets = BufferSets::open(first, second)?;
        let shape = sets.shape();
        let batch = manager.get().call(py, shape.max_rows as u64 * shape.max_blocks as u64, |manager| {
            // SAFETY: nobody else has these sets yet.
            manager.create_batch(shape, &mut unsafe { sets.lend() })
        })?;
        Ok(Self { manager, batch, shape, sets })
    }

    /// A batch in an object that refers to the manager, or the other way round, is garbage once both are.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.manager)
    }

    /// Make a sequence the last row; which row that is. The next step shows it. O(1).
    ///
    /// Raises `UnknownSequenceError`; `StateError` if it is a row of a batch already or the batch is full;
    /// `SequenceTooLongError` if `block_tables` has too few columns for it.
    fn add(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<usize> {
        let id = read_sequence_id(sequence_id)?;
        self.manager.get().call(py, 0, |manager| manager.batch(self.batch)?.add(id))
    }

    /// Take a sequence out; the last row moves into the hole. (The row it had, the sequence that has it now: None if it
    /// was the last). O(1).
    ///
    /// Raises `UnknownSequenceError`; `StateError` if it is no row of this batch.
    fn remove(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<(usize, Option<u64>)> {
        let id = read_sequence_id(sequence_id)?;
        self.manager.get().call(py, 0, |manager| manager.batch(self.batch)?.remove(id))
    }

    /// Append one token, or `counts[row]` (0, a chunk of a prompt, drafts), to every row, and write the set whose turn
    /// it is. O(rows + tokens + changes).
    ///
    /// `counts [num_rows]` and `token_ids`, one for each new token, row after row, if they are known: numpy arrays of
    /// int32 or int64 (fastest), CPU tensors, other buffers, or iterables of ints. All rows or none: a step that raises
    /// has changed nothing, and the turn stays.
    ///
    /// Raises `ArgumentError` for bad counts or ids, or more tokens than `slot_mapping` has room for;
    /// `SequenceTooLongError` if `block_tables` has too few columns for a row; `OutOfBlocksError` with the first `row`
    /// that lacks a block.
    #[pyo3(signature = (counts = None, token_ids = None))]
    fn step(
        &self,
        py: Python<'_>,
        counts: Option<&Bound<'_, PyAny>>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<BatchStep> {
        let counts = counts.map(|counts| read_counts(counts, "counts")).transpose()?;
        let token_ids = token_ids.map(read_token_ids).transpose()?;
        let counts = counts.as_deref();
        let work = counts.unwrap_or_default().iter().fold(0, |sum: u64, &count| sum.saturating_add(count));
        let step = self.manager.get().call(py, work, |manager| {
            // SAFETY: under the lock of the only manager that has this batch.
            let mut sets = unsafe { self.sets.lend() };
            manager.batch(self.batch)?.step(&mut sets, counts, token_ids.as_deref())
        })?;
        Ok(step.into())
    }

    /// Say that the first `ns[row]` tokens of each row, all by default, are written: `commit_batch` by row, which
    /// raises the same. O(rows + ids + blocks that became full).
    #[pyo3(signature = (ns = None, token_ids = None))]
    fn commit(
        &self,
        py: Python<'_>,
        ns: Option<&Bound<'_, PyAny>>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let ns = ns.map(|ns| read_counts(ns, "ns")).transpose()?;
        let token_ids = token_ids.map(read_token_ids).transpose()?;
        let work = token_ids.as_ref().map_or(0, Vec::len) as u64;
        self.manager
            .get()
            .call(py, work, |manager| manager.batch(self.batch)?.commit(ns.as_deref(), token_ids.as_deref()))
    }

    /// Say that what the sets and the device show is unknown, as somebody wrote over them. Each set is written in full
    /// at its next turn, and the next step says to upload the table. O(rows).
    fn invalidate(&self, py: Python<'_>) -> PyResult<()> {
        self.manager.get().call(py, 0, |manager| manager.batch(self.batch)?.invalidate())
    }

    /// Rows in use: 0 to `num_rows` - 1. O(1).
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<usize> {
        self.manager.get().call(py, 0, |manager| Ok(manager.batch(self.batch)?.sequence_ids()?.len()))
    }

    /// The sequence of each row. O(rows).
    #[getter]
    fn sequence_ids(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.manager.get().call(py, 0, |manager| Ok(manager.batch(self.batch)?.sequence_ids()?.collect()))
    }

    /// B: sequences at once.
    #[getter]
    fn max_rows(&self) -> usize {
        self.shape.max_rows
    }

    /// M: blocks of one sequence.
    #[getter]
    fn max_blocks(&self) -> usize {
        self.shape.max_blocks
    }

    /// T: new tokens of one step.
    #[getter]
    fn max_tokens(&self) -> usize {
        self.shape.max_tokens
    }

    /// C: table entries that one step can list.
    #[getter]
    fn max_changes(&self) -> usize {
        self.shape.max_changes
    }
}

fn read_manager(value: &Bound<'_, PyAny>) -> PyResult<Py<KVBlockManager>> {
    let manager = value.cast::<KVBlockManager>();
    Ok(manager.map_err(|_| wrong_kind(value, "manager", "a KVBlockManager"))?.clone().unbind())
}

impl Drop for DecodeBatch {
    /// Its sequences are rows of no batch any more.
    fn drop(&mut self) {
        let forgotten =
            Python::try_attach(|py| self.manager.get().call(py, 0, |manager| manager.drop_batch(self.batch)));
        // Refused only by a manager that a panic made unusable, or an interpreter that is going away.
        drop(forgotten);
    }
}

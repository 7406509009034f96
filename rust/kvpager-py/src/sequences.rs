//! The methods of the class about one sequence.

use kvpager_core::{BlockId, Slot};
use pyo3::prelude::*;

use crate::arguments::{COUNT, ID, read_natural, read_position, read_sequence_id};
use crate::arrays::{Run, read_run, read_token_id, read_token_ids};
use crate::manager::KVBlockManager;

#[pymethods]
impl KVBlockManager {
    /// Make an empty sequence, which holds no block yet. O(1).
    fn create_sequence(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.create_sequence(id))
    }

    /// Append one token, with its id if it is known; its slot. O(1).
    #[pyo3(signature = (sequence_id, token_id = None))]
    fn append_token(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        token_id: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Slot> {
        let id = read_sequence_id(sequence_id)?;
        let token_id = token_id.map(read_token_id).transpose()?;
        self.call(py, 0, |manager| manager.append_token(id, token_id))
    }

    /// Append a run: `n` tokens, or, if `n` has a dimension, tokens with these ids; their slots. O(tokens).
    fn append_tokens(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        n: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Slot>> {
        let id = read_sequence_id(sequence_id)?;
        let (run, mut slots) = (read_run(n)?, Vec::new());
        let (n, token_ids) = match &run {
            Run::Count(n) => (*n, None),
            Run::TokenIds(token_ids) => (token_ids.len() as u64, Some(token_ids.as_slice())),
        };
        self.call(py, n, |manager| manager.append_tokens(id, n, token_ids, &mut slots))?;
        Ok(slots)
    }

    /// Say that the first `n` tokens are written: blocks that became full can be found from now on. `token_ids` are
    /// those of the positions below `n` not known yet, in order. O(ids + blocks that became full).
    #[pyo3(signature = (sequence_id, n, token_ids = None))]
    fn commit(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        n: &Bound<'_, PyAny>,
        token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let id = read_sequence_id(sequence_id)?;
        let n = read_natural(n, "n", COUNT)?;
        let token_ids = token_ids.map(read_token_ids).transpose()?;
        let work = token_ids.as_ref().map_or(0, Vec::len) as u64;
        self.call(py, work, |manager| manager.commit(id, n, token_ids.as_deref()))
    }

    /// Tokens of a sequence that are known to be written. O(1).
    fn num_computed_tokens(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<u64> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.num_computed_tokens(id))
    }

    /// Give every block back, last block first, and forget the id. O(blocks).
    fn release_sequence(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.release_sequence(id))
    }

    /// Roll back to the first `n` tokens; surplus blocks are given back, last first. O(blocks given back).
    fn truncate_sequence(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        n: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let id = read_sequence_id(sequence_id)?;
        let n = read_natural(n, "n", COUNT)?;
        self.call(py, 0, |manager| manager.truncate_sequence(id, n))
    }

    /// Make `child` from the first `num_tokens` tokens of `parent` (default: all) by sharing their blocks. O(blocks).
    #[pyo3(signature = (parent, child, num_tokens = None))]
    fn fork_sequence(
        &self,
        py: Python<'_>,
        parent: &Bound<'_, PyAny>,
        child: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let parent = read_natural(parent, "parent", ID)?;
        let child = read_natural(child, "child", ID)?;
        let num_tokens = num_tokens.map(|count| read_natural(count, "num_tokens", COUNT)).transpose()?;
        self.call(py, 0, |manager| manager.fork_sequence(parent, child, num_tokens))
    }

    /// Hand over the owed copies as (source, destination) pairs, oldest first. O(pairs).
    fn take_copies(&self, py: Python<'_>) -> PyResult<Vec<(BlockId, BlockId)>> {
        self.call(py, 0, |manager| Ok(manager.take_copies()))
    }

    /// (block, offset) of an existing token. O(1).
    fn locate(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        position: &Bound<'_, PyAny>,
    ) -> PyResult<(BlockId, u64)> {
        let id = read_sequence_id(sequence_id)?;
        let position = read_position(position, "position")?;
        self.call(py, 0, |manager| manager.locate(id, position))
    }

    /// Slots of the existing tokens `start` to `stop`, exclusive. O(stop - start).
    fn slots(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        start: &Bound<'_, PyAny>,
        stop: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Slot>> {
        let id = read_sequence_id(sequence_id)?;
        let (start, stop) = (read_position(start, "start")?, read_position(stop, "stop")?);
        self.call(py, stop.saturating_sub(start), |manager| {
            let mut slots = Vec::new();
            manager.slots(id, start, stop, &mut slots)?;
            Ok(slots)
        })
    }

    /// Tokens that own a slot: the position of the next append. O(1).
    fn sequence_length(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<u64> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.sequence_length(id))
    }

    /// The physical blocks of a sequence, logical block 0 first. O(blocks).
    fn block_table(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.block_table(id).map(<[_]>::to_vec))
    }

    /// (length, block table) of a sequence at one moment. O(blocks).
    fn sequence_state(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, Vec<BlockId>)> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| Ok((manager.sequence_length(id)?, manager.block_table(id)?.to_vec())))
    }

    /// Ids of all sequences, ascending. O(n log n).
    fn sequence_ids(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.call(py, 0, |manager| Ok(manager.sequence_ids()))
    }
}

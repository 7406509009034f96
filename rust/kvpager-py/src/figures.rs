//! The methods of the class about single blocks, and what it tells people about itself.

use kvpager_core::{BlockId, BlockManager, BlockState, Slot};
use pyo3::prelude::*;

use crate::answers::{BlockInfo, PoolStats};
use crate::arguments::read_sequence_id;
use crate::manager::KVBlockManager;

#[pymethods]
impl KVBlockManager {
    /// Take a block outside any sequence. O(1).
    fn allocate_block(&self, py: Python<'_>) -> PyResult<BlockId> {
        self.call(py, 0, BlockManager::allocate_block)
    }

    /// Give back a block that `allocate_block` handed out. O(1).
    fn free_block(&self, py: Python<'_>, block_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = self.read_block(block_id)?;
        self.call(py, 0, |manager| manager.free_block(block))
    }

    /// Holders of a block: table entries that name it, pins, and a caller who allocated it. O(1).
    fn ref_count(&self, py: Python<'_>, block_id: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = self.read_block(block_id)?;
        self.call(py, 0, |manager| manager.ref_count(block))
    }

    /// Blocks in the pool.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.config.num_blocks()
    }

    /// Token positions of one block.
    #[getter]
    fn block_size(&self) -> u64 {
        self.config.block_size()
    }

    /// Blocks that an allocation may take now. O(1).
    #[getter]
    fn num_free_blocks(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, 0, |manager| Ok(manager.num_free_blocks()))
    }

    /// Live blocks as a fraction of the pool. O(1).
    #[getter]
    fn usage(&self, py: Python<'_>) -> PyResult<f64> {
        let stats = self.call(py, 0, |manager| Ok(manager.stats()))?;
        Ok(stats.live as f64 / stats.num_blocks as f64)
    }

    /// Sequences that exist. O(1).
    #[getter]
    fn num_sequences(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, 0, |manager| Ok(manager.stats().num_sequences))
    }

    /// Ids of the free blocks in the order of hand-out. O(N).
    #[getter]
    fn free_blocks(&self, py: Python<'_>) -> PyResult<Vec<BlockId>> {
        self.call(py, self.all_blocks(), |manager| Ok(manager.free_blocks()))
    }

    /// The counters of this moment. O(1).
    #[getter]
    fn stats(&self, py: Python<'_>) -> PyResult<PoolStats> {
        self.call(py, 0, |manager| Ok(manager.stats().into()))
    }

    /// Positions of live blocks that hold no token, each block once, O(table entries); or of one sequence's blocks,
    /// O(1).
    #[pyo3(signature = (sequence_id = None))]
    fn internal_fragmentation_tokens(
        &self,
        py: Python<'_>,
        sequence_id: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        if let Some(id) = sequence_id.map(read_sequence_id).transpose()? {
            return self.call(py, 0, |manager| manager.internal_fragmentation_tokens(Some(id)));
        }
        self.call(py, self.all_blocks(), |manager| manager.internal_fragmentation_tokens(None))
    }

    /// Everything about one block, for people. O(entries + cached blocks).
    fn block_info(&self, py: Python<'_>, block_id: &Bound<'_, PyAny>) -> PyResult<BlockInfo> {
        let block = self.read_block(block_id)?;
        self.call(py, self.all_blocks(), |manager| manager.block_info(block)).map(BlockInfo::from)
    }

    /// `live`, `fenced`, `cached` or `free`, of every block. O(N).
    fn block_states(&self, py: Python<'_>) -> PyResult<Vec<&'static str>> {
        let states = self.call(py, self.all_blocks(), |manager| Ok(manager.block_states()))?;
        Ok(states.into_iter().map(BlockState::as_str).collect())
    }

    /// Audit everything; one sentence for each thing that is broken, none if all is sound. O(blocks + entries).
    fn check_invariants(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.call(py, self.all_blocks(), |manager| Ok(manager.check_invariants()))
    }

    /// Whether the audit finds nothing. O(blocks + entries).
    fn invariants_ok(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, self.all_blocks(), |manager| Ok(manager.check_invariants().is_empty()))
    }

    /// Converts the id, does nothing and returns 0: what crossing the boundary costs with the signature of
    /// `append_token`, for its benchmark.
    #[expect(clippy::unused_self, reason = "a method like `append_token`, without its work")]
    fn _empty_call(&self, _py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<Slot> {
        read_sequence_id(sequence_id).map(|_| 0)
    }
}

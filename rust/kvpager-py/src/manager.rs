//! The Python class around one core manager and one lock.
//!
//! Rules that keep it sound: Python code is never run while the lock is held (arguments are converted before, answers
//! after); a thread that waits for the lock has let go of the interpreter; work that may take long runs detached from
//! it. So any interleaving of threads equals some serial order, and there is no deadlock with the interpreter.
//!
//! Long, because the methods of one Python class stand in one block; each converts, calls and returns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvpager_core::{BlockId, BlockManager, Config, Error, Slot};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::arguments::{COUNT, ID, read_config, read_natural, read_position, read_sequence_id};
use crate::buffers::{Arrays, Out};
use crate::failure::{Failure, argument_error, config_error, guarded};
use crate::stats::PoolStats;

/// Above this many tokens, table entries or blocks a call lets other Python threads run meanwhile. Letting go of the
/// interpreter and coming back costs about as much as 200 tokens; this many take some 5 µs.
const LONG_WORK: u64 = 8192;

/// What the lock protects.
struct State {
    manager: BlockManager,
    /// Taken out by a batched call while it converts, so that a nested or parallel call makes its own.
    arrays: Arrays,
}

/// The block manager in Rust: maps the tokens of many sequences to the blocks of one pool.
///
/// `kvpager.KVBlockManager` adds the calls that give tensors. Integers out of range raise `ArgumentError`, what is no
/// integer raises `TypeError`; arguments are checked before the state is looked at.
#[pyclass(frozen, subclass, module = "kvpager._core")]
pub(crate) struct KVBlockManager {
    config: Config,
    state: Mutex<State>,
}

impl KVBlockManager {
    /// Runs `body` under the lock; detached from the interpreter if it may take long.
    #[inline]
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: u64,
        body: impl FnOnce(&mut BlockManager) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let answer = if work > LONG_WORK {
            py.detach(|| {
                guarded(|| {
                    let mut state = self.state.lock().map_err(|_| Failure::Poisoned)?;
                    Ok(body(&mut state.manager)?)
                })
            })
        } else {
            guarded(|| {
                let mut state = self.state.lock_py_attached(py).map_err(|_| Failure::Poisoned)?;
                Ok(body(&mut state.manager)?)
            })
        };
        answer.map_err(PyErr::from)
    }

    /// Runs a batched call with the kept arrays, filled with `ids`.
    fn with_arrays<T>(
        &self,
        ids: &Bound<'_, PyAny>,
        body: impl FnOnce(&mut Arrays) -> PyResult<T>,
    ) -> PyResult<T> {
        let py = ids.py();
        let mut arrays = std::mem::take(&mut self.lock_state(py).arrays);
        let answer = arrays.read_ids(ids).and_then(|()| body(&mut arrays));
        self.lock_state(py).arrays = arrays;
        answer
    }

    /// The parameter `block_id`, any block of this pool.
    fn read_block(&self, block_id: &Bound<'_, PyAny>) -> PyResult<BlockId> {
        let last = self.config.num_blocks() - 1;
        let wanted = format!("a block in 0..{last}");
        let block = read_natural(block_id, "block_id", &wanted)?;
        let found = BlockId::try_from(block).ok().filter(|&block| block <= last);
        found.ok_or_else(|| argument_error("block_id", &wanted, block.to_string()))
    }

    /// The lock for the arrays only, which are cleared before each use: a poisoned one is as good.
    fn lock_state(&self, py: Python<'_>) -> MutexGuard<'_, State> {
        self.state.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

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
    #[new]
    #[pyo3(signature = (num_physical_blocks, block_size, *, enable_prefix_caching = false))]
    fn new(
        num_physical_blocks: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        enable_prefix_caching: bool,
    ) -> PyResult<Self> {
        let num_physical_blocks = read_config(num_physical_blocks, "num_physical_blocks")?;
        let block_size = read_config(block_size, "block_size")?;
        if enable_prefix_caching {
            let reason = "`enable_prefix_caching`: arrives with the prefix index, pass False";
            return Err(config_error(reason.to_owned()));
        }
        let made = guarded(|| {
            let config = Config::new(num_physical_blocks, block_size)?;
            Ok((config, BlockManager::new(config)?))
        });
        let (config, manager) = made?;
        Ok(Self { config, state: Mutex::new(State { manager, arrays: Arrays::default() }) })
    }

    // ---- sequences -------------------------------------------------------------------------------------------------

    /// Make an empty sequence, which holds no block yet. O(1).
    fn create_sequence(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.create_sequence(id))
    }

    /// Append one token; its slot. O(1).
    fn append_token(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<Slot> {
        let id = read_sequence_id(sequence_id)?;
        self.call(py, 0, |manager| manager.append_token(id))
    }

    /// Append a run of `n` tokens; their slots. O(n).
    fn append_tokens(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        n: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Slot>> {
        let id = read_sequence_id(sequence_id)?;
        let n = read_natural(n, "n", COUNT)?;
        self.call(py, n, |manager| {
            let mut slots = Vec::new();
            manager.append_tokens(id, n, &mut slots)?;
            Ok(slots)
        })
    }

    /// Say that the first `n` tokens are written; without a prefix index a check and no more. O(1).
    fn commit(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = read_sequence_id(sequence_id)?;
        let n = read_natural(n, "n", COUNT)?;
        self.call(py, 0, |manager| manager.commit(id, n))
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

    // ---- batches ---------------------------------------------------------------------------------------------------

    /// Append `counts[row]` tokens (default 1) to each of `ids`, in order, and write their slots to `out`, a writable
    /// int64 buffer of exactly that many elements. All rows or none. O(tokens).
    #[pyo3(signature = (ids, counts, out))]
    fn slot_mapping_into(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.with_arrays(ids, |arrays| {
            counts.map(|counts| arrays.read_counts(counts)).transpose()?;
            let num_tokens = count_tokens(arrays, counts.is_some())?;
            let Arrays { ids, counts: kept_counts, slots, .. } = arrays;
            let kept_counts = counts.is_some().then_some(kept_counts.as_slice());
            let target = match Out::<i64>::open_exact(out, "int64", num_tokens) {
                Ok(target) => target,
                Err(about_out) => {
                    // What is wrong with the batch itself is said first.
                    self.call(py, 0, |manager| manager.settle_batch(ids, kept_counts, None))?;
                    return Err(about_out);
                }
            };
            slots.clear();
            self.call(py, num_tokens, |manager| manager.append_batch(ids, kept_counts, slots))?;
            target.fill(py, slots)
        })
    }

    /// How many slots `slot_mapping_into` would write for these arguments. O(ids).
    #[pyo3(signature = (ids, counts = None))]
    fn count_new_tokens(&self, ids: &Bound<'_, PyAny>, counts: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        self.with_arrays(ids, |arrays| {
            counts.map(|counts| arrays.read_counts(counts)).transpose()?;
            count_tokens(arrays, counts.is_some())
        })
    }

    /// Entries of the longest block table among `ids`; 0 if there are none. O(ids).
    fn longest_table(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.with_arrays(ids, |arrays| {
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
        self.with_arrays(ids, |arrays| {
            let Arrays { ids, entries, .. } = arrays;
            self.call(py, ids.len() as u64, |manager| manager.longest_table(ids))?; // unknown ids are said first
            let wanted = || format!("a writable, contiguous int32 buffer of {} rows on the CPU", ids.len());
            let target = Out::<i32>::open(out, wanted)?;
            let num_entries = target.len();
            let rows_fit = match *target.shape() {
                [num_rows, _] => num_rows == ids.len(),
                _ => num_entries.is_multiple_of(ids.len()),
            };
            if !rows_fit {
                return Err(argument_error("out", &wanted(), target.describe()));
            }
            let max_blocks = num_entries.checked_div(ids.len()).unwrap_or(0);
            entries.resize(num_entries, 0);
            self.call(py, num_entries as u64, |manager| {
                let longest = manager.longest_table(ids)?;
                if longest <= max_blocks {
                    return manager.write_block_tables(ids, max_blocks, entries);
                }
                let wanted = format!("room for {longest} blocks in a row, the longest table");
                Err(Error::Argument { argument: "out", wanted, got: target.describe() })
            })?;
            target.fill(py, entries)
        })
    }

    /// Write the lengths of `ids` to `out`, a writable int32 buffer `[B]`. O(B).
    fn seq_lens_into(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_arrays(ids, |arrays| {
            let Arrays { ids, entries, .. } = arrays;
            entries.resize(ids.len(), 0);
            self.call(py, ids.len() as u64, |manager| manager.write_seq_lens(ids, entries))?;
            Out::<i32>::open_exact(out, "int32", ids.len() as u64)?.fill(py, entries)
        })
    }

    // ---- blocks held by the caller, and figures --------------------------------------------------------------------

    /// Take a block outside any sequence. O(1).
    fn allocate_block(&self, py: Python<'_>) -> PyResult<BlockId> {
        self.call(py, 0, BlockManager::allocate_block)
    }

    /// Give back a block that `allocate_block` handed out. O(1).
    fn free_block(&self, py: Python<'_>, block_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = self.read_block(block_id)?;
        self.call(py, 0, |manager| manager.free_block(block))
    }

    /// Holders of a block: table entries that name it, plus a caller who allocated it. O(1).
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
    fn num_sequences(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, 0, |manager| Ok(manager.num_sequences()))
    }

    /// Ids of the free blocks in the order of hand-out. O(N).
    #[getter]
    fn free_blocks(&self, py: Python<'_>) -> PyResult<Vec<BlockId>> {
        self.call(py, u64::from(self.config.num_blocks()), |manager| Ok(manager.free_blocks()))
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
            return self.call(py, 0, |manager| manager.sequence_fragmentation_tokens(id));
        }
        let work = u64::from(self.config.num_blocks());
        self.call(py, work, |manager| Ok(manager.internal_fragmentation_tokens()))
    }

    /// Audit everything; one sentence for each thing that is broken, none if all is sound. O(blocks + entries).
    fn check_invariants(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let work = u64::from(self.config.num_blocks());
        self.call(py, work, |manager| Ok(manager.check_invariants()))
    }

    /// Whether the audit finds nothing. O(blocks + entries).
    fn invariants_ok(&self, py: Python<'_>) -> PyResult<bool> {
        let work = u64::from(self.config.num_blocks());
        self.call(py, work, |manager| Ok(manager.invariants_ok()))
    }

    /// Converts the id, does nothing and returns 0: what crossing the boundary costs with the signature of
    /// `append_token`, for its benchmark.
    #[expect(clippy::unused_self, reason = "a method like `append_token`, without its work")]
    fn _empty_call(&self, _py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<Slot> {
        read_sequence_id(sequence_id).map(|_| 0)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let stats = self.call(py, 0, |manager| Ok(manager.stats()))?;
        Ok(format!(
            "KVBlockManager({} blocks of {} tokens: {} live, {} fenced, {} free; {} sequences)",
            stats.num_blocks,
            self.config.block_size(),
            stats.live,
            stats.fenced,
            stats.free,
            stats.num_sequences
        ))
    }
}

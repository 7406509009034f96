//! The Python class around one core manager and one lock.
//!
//! Rules that keep it sound: Python code is never run while the lock is held (arguments are converted before, answers
//! after); a thread that waits for the lock has let go of the interpreter; work that may take long runs detached from
//! it. So any interleaving of threads equals some serial order, and there is no deadlock with the interpreter.
//!
//! Its methods stand beside it: `sequences`, `batches`, `prefix` and `figures`; each converts, calls and returns.

use std::sync::Mutex;

use kvpager_core::{BlockId, BlockManager, Config, Error, EvictionPolicy};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyTuple;

use crate::arguments::{read_config, read_flag, read_up_to, text};
use crate::failure::{Failure, config_error, guarded};

/// Above this many tokens, table entries or blocks a call lets other Python threads run meanwhile. Letting go of the
/// interpreter and coming back costs about as much as 200 tokens; this many take some 5 µs.
const LONG_WORK: u64 = 8192;

/// The block manager in Rust: maps the tokens of many sequences to the blocks of one pool.
///
/// `kvpager.KVBlockManager` adds what people look at. Integers out of range raise `ArgumentError`, other kinds raise
/// `TypeError`; all arguments, `out` too, are checked before the state is looked at.
#[pyclass(frozen, subclass, module = "kvpager._core")]
pub(crate) struct KVBlockManager {
    pub(crate) config: Config,
    manager: Mutex<BlockManager>,
}

impl KVBlockManager {
    /// Runs `body` under the lock; detached from the interpreter if it may take long.
    #[inline]
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: u64,
        body: impl FnOnce(&mut BlockManager) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let answer = if work > LONG_WORK {
            py.detach(|| {
                guarded(|| {
                    let mut manager = self.manager.lock().map_err(|_| Failure::Poisoned)?;
                    Ok(body(&mut manager)?)
                })
            })
        } else {
            guarded(|| {
                let mut manager = self.manager.lock_py_attached(py).map_err(|_| Failure::Poisoned)?;
                Ok(body(&mut manager)?)
            })
        };
        answer.map_err(PyErr::from)
    }

    /// The parameter `block_id`, any block of this pool.
    pub(crate) fn read_block(&self, block_id: &Bound<'_, PyAny>) -> PyResult<BlockId> {
        let last = self.config.num_blocks() - 1;
        read_up_to(block_id, "block_id", last, &format!("a block in 0..{last}"))
    }

    /// Token positions of the whole pool.
    pub(crate) fn num_slots(&self) -> u64 {
        u64::from(self.config.num_blocks()) * self.config.block_size()
    }

    /// The work of a call that looks at every block.
    pub(crate) fn all_blocks(&self) -> u64 {
        self.config.num_blocks().into()
    }
}

#[pymethods]
impl KVBlockManager {
    /// Names that `eviction_policy` may have, the default first.
    #[classattr]
    fn eviction_policies(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, EvictionPolicy::ALL.iter().map(|policy| policy.as_str()))
    }

    #[new]
    #[pyo3(signature = (
        num_physical_blocks, block_size, *, enable_prefix_caching = false, watermark_blocks = None, fences = false,
        eviction_policy = None, hash_seed = None, max_pinned_blocks = None, max_sequence_length = None,
        _equal_hashes = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python constructor")]
    #[expect(clippy::used_underscore_binding, reason = "a hook for tests, marked so in Python")]
    fn new(
        num_physical_blocks: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = read_caching)] enable_prefix_caching: bool,
        watermark_blocks: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = read_fences)] fences: bool,
        eviction_policy: Option<&Bound<'_, PyAny>>,
        hash_seed: Option<&Bound<'_, PyAny>>,
        max_pinned_blocks: Option<&Bound<'_, PyAny>>,
        max_sequence_length: Option<&Bound<'_, PyAny>>,
        _equal_hashes: bool,
    ) -> PyResult<Self> {
        let in_63_bits = "1 to 2^63-1";
        let last = i64::MAX as u64;
        let num_blocks = read_config(num_physical_blocks, "num_physical_blocks", last, in_63_bits)?;
        let block_size = read_config(block_size, "block_size", last, in_63_bits)?;
        let up_to_all = format!("0 to {num_blocks}");
        let option = |value: Option<&Bound<'_, PyAny>>, argument: &str, wanted: &str| {
            value.map(|value| read_config(value, argument, u64::MAX, wanted)).transpose()
        };
        let mut config = guarded(|| Ok(Config::new(num_blocks, block_size)?))?
            .with_prefix_caching(enable_prefix_caching)
            .with_fences(fences)
            .with_constant_hash(_equal_hashes);
        if let Some(blocks) = option(watermark_blocks, "watermark_blocks", &up_to_all)? {
            config = guarded(|| Ok(config.with_watermark_blocks(blocks)?))?;
        }
        if let Some(value) = eviction_policy {
            config = config.with_eviction_policy(read_policy(value)?);
        }
        if let Some(seed) = option(hash_seed, "hash_seed", "0 to 2^64-1")? {
            config = config.with_hash_seed(seed);
        }
        if let Some(blocks) = option(max_pinned_blocks, "max_pinned_blocks", &up_to_all)? {
            config = guarded(|| Ok(config.with_max_pinned_blocks(blocks)?))?;
        }
        if let Some(tokens) = option(max_sequence_length, "max_sequence_length", in_63_bits)? {
            config = guarded(|| Ok(config.with_max_sequence_length(tokens)?))?;
        }
        let manager = guarded(|| Ok(BlockManager::new(config)?))?;
        Ok(Self { config, manager: Mutex::new(manager) })
    }
}

fn read_caching(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    read_flag(value, "enable_prefix_caching")
}

fn read_fences(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    read_flag(value, "fences")
}

fn read_policy(value: &Bound<'_, PyAny>) -> PyResult<EvictionPolicy> {
    let name = text(value);
    name.parse().map_err(|wanted| config_error(format!("`eviction_policy`: wanted {wanted}, got {name}")))
}

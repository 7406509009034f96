//! The Python class around one core manager and one lock.
//!
//! Rules that keep it sound: Python code is never run while the lock is held (arguments are converted before, answers
//! after); a thread that waits for the lock has let go of the interpreter; work that may take long runs detached from
//! it. So any interleaving of threads equals some serial order, and there is no deadlock with the interpreter.
//!
//! Its methods stand beside it: `sequences`, `batches`, `exports`, `prefix` and `figures`; each converts, calls and
//! returns.

use std::sync::Mutex;

use kvpager_core::{BlockId, BlockManager, Config, Error, EvictionPolicy};
use pyo3::buffer::Element;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::arguments::{read_config, read_flag, read_natural, read_option, text};
use crate::arrays::Arrays;
use crate::failure::{Failure, argument_error, config_error, guarded};
use crate::out::Out;

/// Above this many tokens, table entries or blocks a call lets other Python threads run meanwhile. Letting go of the
/// interpreter and coming back costs about as much as 200 tokens; this many take some 5 µs.
const LONG_WORK: u64 = 8192;

/// The block manager in Rust: maps the tokens of many sequences to the blocks of one pool.
///
/// `kvpager.KVBlockManager` adds what people look at. Integers out of range raise `ArgumentError`, what is no
/// integer raises `TypeError`; arguments are checked before the state is looked at.
#[pyclass(frozen, subclass, module = "kvpager._core")]
pub(crate) struct KVBlockManager {
    pub(crate) config: Config,
    manager: Mutex<BlockManager>,
    /// Taken out by a batched call while it converts, so that a nested or parallel call makes its own.
    arrays: Mutex<Option<Box<Arrays>>>,
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

    /// [`call`](Self::call) with an answer that `body` writes to `out` once nothing can fail any more.
    ///
    /// What was only looked at is written at once, while this thread keeps the interpreter and nobody else has the lock;
    /// otherwise it is held first.
    #[inline]
    pub(crate) fn call_into<T: Element + Send + Sync, R: Send>(
        &self,
        py: Python<'_>,
        work: u64,
        out: Out<'_, '_, T>,
        body: impl FnOnce(&mut BlockManager, &mut [T]) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        if let Out::Seen(_, seen) = out
            && work <= LONG_WORK
            && let Ok(mut manager) = self.manager.try_lock()
        {
            // SAFETY: opened as an `out` of this type; no Python has run since, and none will before `body` is done.
            // Under the lock nobody else here has a slice over the caller's memory.
            let answer = guarded(move || Ok(body(&mut manager, unsafe { seen.slice_mut() })?));
            return answer.map_err(PyErr::from);
        }
        let held = out.hold()?;
        // SAFETY: under the lock nobody else here has a slice over the caller's memory.
        self.call(py, work, |manager| body(manager, unsafe { held.slice() }))
    }

    /// Runs a call that reads arrays with the kept memory.
    #[inline]
    pub(crate) fn with_arrays<T>(&self, body: impl FnOnce(&mut Arrays) -> PyResult<T>) -> PyResult<T> {
        let kept = self.arrays.try_lock().ok().and_then(|mut kept| kept.take());
        let mut arrays = kept.unwrap_or_default();
        let answer = body(&mut arrays);
        if let Ok(mut kept) = self.arrays.try_lock() {
            *kept = Some(arrays);
        }
        answer
    }

    /// The parameter `block_id`, any block of this pool.
    pub(crate) fn read_block(&self, block_id: &Bound<'_, PyAny>) -> PyResult<BlockId> {
        let last = self.config.num_blocks() - 1;
        let wanted = format!("a block in 0..{last}");
        let block = read_natural(block_id, "block_id", &wanted)?;
        let found = BlockId::try_from(block).ok().filter(|&block| block <= last);
        found.ok_or_else(|| argument_error("block_id", &wanted, block.to_string()))
    }
}

#[pymethods]
impl KVBlockManager {
    /// Names that `eviction_policy` may have, the default first.
    #[classattr]
    fn eviction_policies() -> Vec<&'static str> {
        EvictionPolicy::ALL.iter().map(|policy| policy.as_str()).collect()
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
        let num_physical_blocks = read_config(num_physical_blocks, "num_physical_blocks")?;
        let block_size = read_config(block_size, "block_size")?;
        let mut config = guarded(|| Ok(Config::new(num_physical_blocks, block_size)?))?
            .with_prefix_caching(enable_prefix_caching)
            .with_fences(fences)
            .with_constant_hash(_equal_hashes);
        let up_to_all = format!("0 to {num_physical_blocks}");
        if let Some(value) = watermark_blocks {
            let num_blocks = read_option(value, "watermark_blocks", &up_to_all)?;
            config = guarded(|| Ok(config.with_watermark_blocks(num_blocks)?))?;
        }
        if let Some(value) = eviction_policy {
            config = config.with_eviction_policy(read_policy(value)?);
        }
        if let Some(value) = hash_seed {
            config = config.with_hash_seed(read_option(value, "hash_seed", "0 to 2^64-1")?);
        }
        if let Some(value) = max_pinned_blocks {
            let num_blocks = read_option(value, "max_pinned_blocks", &up_to_all)?;
            config = guarded(|| Ok(config.with_max_pinned_blocks(num_blocks)?))?;
        }
        if let Some(value) = max_sequence_length {
            let num_tokens = read_option(value, "max_sequence_length", "1 to 2^63-1")?;
            config = guarded(|| Ok(config.with_max_sequence_length(num_tokens)?))?;
        }
        let manager = guarded(|| Ok(BlockManager::new(config)?))?;
        Ok(Self { config, manager: Mutex::new(manager), arrays: Mutex::default() })
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

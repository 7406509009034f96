//! Answers of several fields as frozen Python objects: plain structs of the core, shown to Python.

use kvpager_core::{BlockState, SequenceId};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// A state of a block: a str to Python.
#[derive(Clone, PartialEq, Eq, Hash, IntoPyObject)]
struct State(&'static str);

/// Ids of sequences: a tuple to Python.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Owners(Vec<SequenceId>);

impl From<BlockState> for State {
    fn from(state: BlockState) -> Self {
        Self(state.as_str())
    }
}

impl From<Vec<SequenceId>> for Owners {
    fn from(ids: Vec<SequenceId>) -> Self {
        Self(ids)
    }
}

impl<'py> IntoPyObject<'py> for Owners {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        PyTuple::new(py, self.0)
    }
}

/// Declares the Python class of a struct of the core, whose fields it has: each field stands once.
macro_rules! answer {
    (
        $(#[$about:meta])*
        $name:ident of $core:ty { $($(#[$about_field:meta])* $field:ident: $kind:ty,)* }
    ) => {
        $(#[$about])*
        #[pyclass(frozen, eq, hash, get_all, module = "kvpager._core")]
        #[derive(Clone, PartialEq, Eq, Hash)]
        pub(crate) struct $name { $($(#[$about_field])* $field: $kind,)* }

        impl From<$core> for $name {
            fn from(answer: $core) -> Self {
                Self { $($field: answer.$field.into(),)* }
            }
        }

        #[pymethods]
        impl $name {
            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let this = self.clone().into_pyobject(py)?;
                let fields = [$(stringify!($field)),*].map(|field| {
                    Ok(format!("{field}={}", this.getattr(field)?.repr()?))
                });
                let fields: PyResult<Vec<String>> = fields.into_iter().collect();
                Ok(format!("{}({})", stringify!($name), fields?.join(", ")))
            }
        }
    };
}

answer! {
    /// Counts at one moment; `live + cached + fenced + free == num_blocks`.
    PoolStats of kvpager_core::Stats {
        /// Blocks in the pool.
        num_blocks: u64,
        /// Blocks with at least one holder.
        live: u64,
        /// Blocks without a holder that the prefix index can still find; handed out by eviction.
        cached: u64,
        /// Blocks without a holder that an untaken copy or work in flight may still touch.
        fenced: u64,
        /// The rest: handed out first.
        free: u64,
        /// Sequences that exist.
        num_sequences: u64,
        /// Copy-on-write pairs that came to be owed since creation.
        num_copies: u64,
        /// The most blocks that were live at once.
        peak_live: u64,
        /// Blocks that the prefix index names, whatever their state.
        indexed: u64,
        /// Blocks that a pin holds, each once.
        pinned: u64,
        /// Tokens that admissions found computed, resumed ones aside.
        num_hit_tokens: u64,
        /// Tokens of the prompts of those admissions.
        num_queried_tokens: u64,
        /// Tokens that resumed admissions found computed.
        num_resumed_tokens: u64,
        /// Cached blocks that were handed out for other content.
        num_evictions: u64,
    }
}

answer! {
    /// One block at one moment, for people and plots.
    BlockInfo of kvpager_core::BlockInfo {
        /// The block.
        block_id: u32,
        /// `live`, `fenced`, `cached` or `free`.
        state: State,
        /// Holders: table entries, pins, and a caller who allocated it.
        ref_count: u32,
        /// Ids of the sequences whose tables name it, ascending.
        owners: Owners,
        /// Pins that hold it.
        num_pins: u32,
        /// Whether a caller holds it, from `allocate_block`.
        is_held: bool,
        /// Whether the prefix index names it.
        is_indexed: bool,
        /// Positions that hold a token.
        num_filled: u64,
        /// Of a cached block: how many are evicted before it; 0 is the next victim.
        eviction_rank: Option<usize>,
    }
}

answer! {
    /// What a step wrote, and where.
    BatchStep of kvpager_core::BatchStep {
        /// The set that holds the step: 0 or 1.
        buffer_set: usize,
        /// Rows in use.
        num_rows: usize,
        /// New tokens of all rows.
        num_tokens: usize,
        /// Table entries that differ from the previous step.
        num_changes: usize,
        /// `changed` does not hold them all, or what the device shows is unknown: upload the table.
        upload_table: bool,
    }
}

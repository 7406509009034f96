//! All about one block as a frozen Python object.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// One block at one moment, for people and plots.
#[pyclass(frozen, eq, hash, module = "kvpager._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct BlockInfo {
    /// The block.
    #[pyo3(get)]
    block_id: u32,
    /// `live`, `fenced`, `cached` or `free`.
    #[pyo3(get)]
    state: &'static str,
    /// Holders: table entries, pins, and a caller who allocated it.
    #[pyo3(get)]
    ref_count: u32,
    owners: Vec<u64>,
    /// Pins that hold it.
    #[pyo3(get)]
    num_pins: u32,
    /// Whether a caller holds it, from `allocate_block`.
    #[pyo3(get)]
    is_held: bool,
    /// Whether the prefix index names it.
    #[pyo3(get)]
    is_indexed: bool,
    /// Positions that hold a token.
    #[pyo3(get)]
    num_filled: u64,
    /// Of a cached block: how many are evicted before it; 0 is the next victim.
    #[pyo3(get)]
    eviction_rank: Option<usize>,
}

impl From<kvpager_core::BlockInfo> for BlockInfo {
    fn from(info: kvpager_core::BlockInfo) -> Self {
        Self {
            block_id: info.block_id,
            state: info.state.as_str(),
            ref_count: info.ref_count,
            owners: info.owners,
            num_pins: info.num_pins,
            is_held: info.is_held,
            is_indexed: info.is_indexed,
            num_filled: info.num_filled,
            eviction_rank: info.eviction_rank,
        }
    }
}

#[pymethods]
impl BlockInfo {
    /// Ids of the sequences whose tables name it, ascending.
    #[getter]
    fn owners<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.owners)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { block_id, state, ref_count, num_pins, num_filled, .. } = self;
        let owners = self.owners(py)?.repr()?.to_string();
        let truth = |value: bool| if value { "True" } else { "False" };
        let (is_held, is_indexed) = (truth(self.is_held), truth(self.is_indexed));
        let rank = self.eviction_rank.map_or_else(|| "None".to_owned(), |rank| rank.to_string());
        Ok(format!(
            "BlockInfo(block_id={block_id}, state='{state}', ref_count={ref_count}, owners={owners}, \
             num_pins={num_pins}, is_held={is_held}, is_indexed={is_indexed}, num_filled={num_filled}, \
             eviction_rank={rank})"
        ))
    }
}

//! The two buffer sets that a batch writes for as long as it lives: checked once, so that a step opens nothing.

use kvpager_core::{BatchBuffers, BatchShape};
use pyo3::buffer::Element;
use pyo3::prelude::*;

use crate::arguments::wrong_kind;
use crate::buffers::Out;
use crate::failure::argument_error;

/// Attributes of a set.
const NAMES: [&str; 5] = ["block_tables", "seq_lens", "query_start_loc", "slot_mapping", "changed"];

/// The attribute `name` of a set, if its shape `fits`; `kind` says in words what does.
fn open<T: Element>(
    set: &Bound<'_, PyAny>,
    name: &str,
    kind: &str,
    fits: impl FnOnce(&[usize]) -> bool,
) -> PyResult<Out<T>> {
    Out::open(name, &set.getattr(name)?, || format!("a writable, contiguous {kind} on the CPU"), fits)
}

/// A buffer of a set: its name, its shape and its memory, as [`Out::span`] has it.
type Part<'a> = (&'static str, &'a [usize], Option<(usize, usize)>);

fn part<'a, T: Element>(name: &'static str, buffer: &'a Out<T>) -> Part<'a> {
    (name, buffer.shape(), buffer.span())
}

/// One set: see [`BatchBuffers`].
struct LentSet {
    block_tables: Out<i32>,
    seq_lens: Out<i32>,
    query_start_loc: Out<i32>,
    slot_mapping: Out<i64>,
    changed: Out<i32>,
}

impl LentSet {
    /// Opens the set that came as `argument`.
    fn open(set: &Bound<'_, PyAny>, argument: &str) -> PyResult<Self> {
        for name in NAMES {
            if !set.hasattr(name)? {
                return Err(wrong_kind(set, argument, &format!("a BatchBuffers, with `{name}`")));
            }
        }
        let block_tables = open(set, "block_tables", "int32 buffer [B, M]", |shape| shape.len() == 2)?;
        let num_rows = block_tables.shape()[0];
        Ok(Self {
            seq_lens: open(set, "seq_lens", "int32 buffer [B]", |shape| shape == [num_rows])?,
            query_start_loc: open(set, "query_start_loc", "int32 buffer [B+1]", |shape| {
                shape == [num_rows + 1]
            })?,
            slot_mapping: open(set, "slot_mapping", "int64 buffer [T]", |shape| shape.len() == 1)?,
            changed: open(set, "changed", "int32 buffer [C, 3]", |shape| matches!(shape, [_, 3]))?,
            block_tables,
        })
    }

    fn parts(&self) -> [Part<'_>; 5] {
        [
            part("block_tables", &self.block_tables),
            part("seq_lens", &self.seq_lens),
            part("query_start_loc", &self.query_start_loc),
            part("slot_mapping", &self.slot_mapping),
            part("changed", &self.changed),
        ]
    }

    /// # Safety
    /// As for [`BufferSets::lend`].
    unsafe fn lend(&self) -> BatchBuffers<'_> {
        // SAFETY: as promised by the caller; the five share no memory.
        unsafe {
            BatchBuffers {
                block_tables: self.block_tables.slice(),
                seq_lens: self.seq_lens.slice(),
                query_start_loc: self.query_start_loc.slice(),
                slot_mapping: self.slot_mapping.slice(),
                changed: self.changed.slice(),
            }
        }
    }
}

/// Both sets of one batch; no two of the ten buffers share memory.
pub(crate) struct BufferSets([LentSet; 2]);

impl BufferSets {
    pub(crate) fn open(first: &Bound<'_, PyAny>, second: &Bound<'_, PyAny>) -> PyResult<Self> {
        let sets = [LentSet::open(first, "first")?, LentSet::open(second, "second")?];
        for ((name, wanted, _), (_, came, _)) in sets[0].parts().into_iter().zip(sets[1].parts()) {
            if came != wanted {
                let wanted = format!("shape {wanted:?}, as in the first set");
                return Err(argument_error(name, &wanted, format!("{came:?}")));
            }
        }
        let mut spans: Vec<_> =
            sets.iter().flat_map(LentSet::parts).filter_map(|(_, _, span)| span).collect();
        spans.sort_unstable();
        if spans.windows(2).any(|pair| pair[1].0 < pair[0].1) {
            let got = "overlapping ones".to_owned();
            return Err(argument_error("second", "buffers that share no memory", got));
        }
        Ok(Self(sets))
    }

    pub(crate) fn shape(&self) -> BatchShape {
        let set = &self.0[0];
        BatchShape {
            max_rows: set.block_tables.shape()[0],
            max_blocks: set.block_tables.shape()[1],
            max_tokens: set.slot_mapping.len(),
            max_changes: set.changed.shape()[0],
        }
    }

    /// # Safety
    /// Only one call at a time may use what is lent (the manager's lock sees to it). Whoever else touches the memory
    /// meanwhile, from Python or a device, races as with any buffer: the contract leaves the set whose turn it is to
    /// the step.
    #[inline]
    pub(crate) unsafe fn lend(&self) -> [BatchBuffers<'_>; 2] {
        // SAFETY: as promised by the caller; the sets share no memory.
        unsafe { [self.0[0].lend(), self.0[1].lend()] }
    }
}

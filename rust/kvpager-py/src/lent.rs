//! The two buffer sets that a batch writes for as long as it lives: checked once, so that a step opens nothing.

use std::ptr::NonNull;

use kvpager_core::{BatchBuffers, BatchShape};
use pyo3::buffer::Element;
use pyo3::prelude::*;

use crate::buffers::Out;
use crate::failure::argument_error;

/// One buffer of a set. `buffer` keeps its memory from being freed, moved or resized.
struct Lent<T> {
    buffer: Out<T>,
    start: NonNull<T>,
    len: usize,
}

// SAFETY: the pointer is only a cached address of `buffer`, which may be held and released from any thread; who reads
// or writes through it keeps to the rule of `BufferSets::lend`.
unsafe impl<T: Send> Send for Lent<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Lent<T> {}

impl<T: Element> Lent<T> {
    /// The attribute `name` of a set, of which `fits` likes the shape; `kind` says in words what is wanted.
    fn open(
        set: &Bound<'_, PyAny>,
        name: &str,
        kind: &str,
        fits: impl FnOnce(&[usize]) -> bool,
    ) -> PyResult<Self> {
        let wanted = || format!("a writable, contiguous {kind} on the CPU");
        let buffer = Out::<T>::open_named(name, &set.getattr(name)?, wanted)?;
        if !fits(buffer.shape()) {
            return Err(argument_error(name, &wanted(), buffer.describe()));
        }
        Ok(Self { start: buffer.start(), len: buffer.len(), buffer })
    }

    fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// First and last address, exclusive; `None` if it is empty.
    fn span(&self) -> Option<(usize, usize)> {
        let start = self.start.as_ptr() as usize;
        (self.len > 0).then(|| (start, start + self.len * size_of::<T>()))
    }

    /// # Safety
    /// No other slice over this buffer may exist meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the memory is the caller's, not a field")]
    unsafe fn slice(&self) -> &mut [T] {
        // SAFETY: `buffer` vouches for `len` aligned, initialised, writable values from `start` on (dangling if `len`
        // is 0) for as long as it is held; the caller for exclusiveness.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// One set: see [`BatchBuffers`].
struct LentSet {
    block_tables: Lent<i32>,
    seq_lens: Lent<i32>,
    query_start_loc: Lent<i32>,
    slot_mapping: Lent<i64>,
    changed: Lent<i32>,
}

impl LentSet {
    fn open(set: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_tables = Lent::open(set, "block_tables", "int32 buffer [B, M]", |shape| shape.len() == 2)?;
        let num_rows = block_tables.shape()[0];
        Ok(Self {
            seq_lens: Lent::open(set, "seq_lens", "int32 buffer [B]", |shape| shape == [num_rows])?,
            query_start_loc: Lent::open(set, "query_start_loc", "int32 buffer [B+1]", |shape| {
                shape == [num_rows + 1]
            })?,
            slot_mapping: Lent::open(set, "slot_mapping", "int64 buffer [T]", |shape| shape.len() == 1)?,
            changed: Lent::open(set, "changed", "int32 buffer [C, 3]", |shape| matches!(shape, [_, 3]))?,
            block_tables,
        })
    }

    fn shapes(&self) -> [(&'static str, &[usize]); 5] {
        [
            ("block_tables", self.block_tables.shape()),
            ("seq_lens", self.seq_lens.shape()),
            ("query_start_loc", self.query_start_loc.shape()),
            ("slot_mapping", self.slot_mapping.shape()),
            ("changed", self.changed.shape()),
        ]
    }

    fn spans(&self) -> impl Iterator<Item = (usize, usize)> {
        let spans = [
            self.block_tables.span(),
            self.seq_lens.span(),
            self.query_start_loc.span(),
            self.slot_mapping.span(),
            self.changed.span(),
        ];
        spans.into_iter().flatten()
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
        let sets = [LentSet::open(first)?, LentSet::open(second)?];
        for ((name, wanted), (_, came)) in sets[0].shapes().into_iter().zip(sets[1].shapes()) {
            if came != wanted {
                let wanted = format!("shape {wanted:?}, as in the first set");
                return Err(argument_error(name, &wanted, format!("{came:?}")));
            }
        }
        let mut spans: Vec<(usize, usize)> = sets.iter().flat_map(LentSet::spans).collect();
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
            max_tokens: set.slot_mapping.len,
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

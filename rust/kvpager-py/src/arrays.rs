//! Arrays from Python: ids, counts and token ids, read once into memory that is kept between calls.
//!
//! An int32 or int64 array or CPU tensor is copied where it lies (`memory`), 2,048 integers in 0.1 µs; other buffers
//! through their protocol, strided or not; any other iterable of ints is accepted for comfort and takes about 10 µs. Not a
//! set or a dict, which are no sequences: a row would be anybody's.
//! Nothing here holds the manager's lock: iterating may run the caller's code.

use std::cell::Cell;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PyInt, PySet};

use kvpager_core::TokenId;
use kvpager_core::config::MAX_TOKEN_ID;

use crate::arguments::{COUNT, ID, TOKEN_ID, read_natural, read_token_id, wrong_kind};
use crate::buffers::{READABLE, describe, is_of, open_readable};
use crate::failure::argument_error;
use crate::memory::{self, Integers};

/// Memory for the arrays of one call, kept between calls so that a step allocates nothing.
#[derive(Default)]
pub(crate) struct Arrays {
    pub(crate) ids: Vec<u64>,
    pub(crate) counts: Vec<u64>,
    pub(crate) slots: Vec<i64>,
    pub(crate) token_ids: Vec<TokenId>,
    pub(crate) entries: Vec<i32>,
    /// What a buffer holds, before its signs are checked.
    wide: Vec<i64>,
    narrow: Vec<i32>,
}

impl Arrays {
    /// Reads the ids of a batched call.
    pub(crate) fn read_ids(&mut self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        read_naturals(ids, "ids", ID, &mut self.ids, &mut self.wide, &mut self.narrow)
    }

    /// Reads the counts of a batched call.
    pub(crate) fn read_counts(&mut self, counts: &Bound<'_, PyAny>) -> PyResult<()> {
        read_naturals(counts, "counts", COUNT, &mut self.counts, &mut self.wide, &mut self.narrow)
    }

    /// Reads the lengths of a batched commit, to where counts are read.
    pub(crate) fn read_lengths(&mut self, ns: &Bound<'_, PyAny>) -> PyResult<()> {
        read_naturals(ns, "ns", COUNT, &mut self.counts, &mut self.wide, &mut self.narrow)
    }

    /// Reads token ids.
    pub(crate) fn read_token_ids(&mut self, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        if memory::read(token_ids, &mut self.token_ids, take_token_ids) == Some(true) {
            return Ok(());
        }
        let buffer = open_readable("token_ids", token_ids)?;
        self.read_opened_token_ids(token_ids, buffer)
    }

    /// Reads an int (a count) or what has a dimension (token ids, to `token_ids`).
    pub(crate) fn read_count_or_token_ids(&mut self, n: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let ndim = || n.getattr(intern!(n.py(), "ndim")).and_then(|ndim| ndim.extract::<usize>());
        if n.is_exact_instance_of::<PyInt>() || ndim().is_ok_and(|ndim| ndim == 0) {
            return read_natural(n, "n", COUNT).map(Some); // a scalar of numpy or torch has no dimension either
        }
        let buffer = open_readable("token_ids", n)?;
        if buffer.is_none() && n.hasattr(intern!(n.py(), "__index__"))? {
            return read_natural(n, "n", COUNT).map(Some);
        }
        if buffer.is_none() && n.try_iter().is_err() {
            return Err(wrong_kind(n, "n", "an int or token ids"));
        }
        self.read_opened_token_ids(n, buffer).map(|()| None)
    }

    fn read_opened_token_ids(
        &mut self,
        values: &Bound<'_, PyAny>,
        buffer: Option<PyUntypedBuffer>,
    ) -> PyResult<()> {
        let (py, token_ids) = (values.py(), &mut self.token_ids);
        token_ids.clear();
        let Some(buffer) = buffer else {
            for value in iterate(values, "token_ids")? {
                token_ids.push(read_token_id(&value?, "token_ids")?);
            }
            return Ok(());
        };
        if !read_integers(&buffer, py, &mut self.wide, &mut self.narrow)? {
            return Err(argument_error("token_ids", READABLE, describe(&buffer)));
        }
        let is_id = |integer: i64| TokenId::try_from(integer).is_ok_and(|id| id <= MAX_TOKEN_ID);
        if let Some(bad) = self.wide.iter().find(|&&integer| !is_id(integer)) {
            return Err(argument_error("token_ids", TOKEN_ID, bad.to_string()));
        }
        token_ids.extend(self.wide.iter().map(|&integer| integer as TokenId));
        Ok(())
    }
}

/// Copies token ids; false if one is out of range. All their bits at once, gathered from what was copied, as others may
/// write meanwhile: a negative or too large id shows in them.
fn take_token_ids(integers: Integers<'_>, token_ids: &mut Vec<TokenId>) -> bool {
    token_ids.clear();
    let mut bits = match integers {
        Integers::Narrow(narrow) => touch(narrow),
        Integers::Wide(wide) => touch(wide),
    };
    let mut look = |integer: i64| {
        bits |= integer;
        integer as TokenId
    };
    match integers {
        Integers::Narrow(narrow) => token_ids.extend(narrow.iter().map(|integer| look(integer.get().into()))),
        Integers::Wide(wide) => token_ids.extend(wide.iter().map(|integer| look(integer.get()))),
    }
    bits as u64 <= u64::from(MAX_TOKEN_ID)
}

/// Reads one integer of each cache line, in four places at once, so that the misses of a prompt that is seen for the
/// first time run side by side. All the bits that it saw.
fn touch<T: Copy + Into<i64>>(integers: &[Cell<T>]) -> i64 {
    let a_line = 64 / size_of::<T>();
    let mut quarters =
        integers.chunks(integers.len().div_ceil(4).max(1)).map(|part| part.iter().step_by(a_line));
    let mut next = || quarters.next().unwrap_or([].iter().step_by(a_line));
    let (mut bits, mut places) = (0, [next(), next(), next(), next()]);
    for _ in 0..places[0].len() {
        for place in &mut places {
            bits |= place.next().map_or(0, |integer| integer.get().into());
        }
    }
    bits
}

/// Copies ids or counts; false if one is negative.
fn take_naturals(integers: Integers<'_>, naturals: &mut Vec<u64>) -> bool {
    naturals.clear();
    let mut bits = 0;
    let mut look = |integer: i64| {
        bits |= integer;
        integer as u64
    };
    match integers {
        Integers::Narrow(narrow) => naturals.extend(narrow.iter().map(|integer| look(integer.get().into()))),
        Integers::Wide(wide) => naturals.extend(wide.iter().map(|integer| look(integer.get()))),
    }
    bits >= 0
}

fn read_naturals(
    values: &Bound<'_, PyAny>,
    argument: &str,
    wanted: &str,
    naturals: &mut Vec<u64>,
    wide: &mut Vec<i64>,
    narrow: &mut Vec<i32>,
) -> PyResult<()> {
    if memory::read(values, naturals, take_naturals) == Some(true) {
        return Ok(());
    }
    naturals.clear();
    if let Some(buffer) = open_readable(argument, values)? {
        if !read_integers(&buffer, values.py(), wide, narrow)? {
            return Err(argument_error(argument, READABLE, describe(&buffer)));
        }
        if let Some(negative) = wide.iter().find(|&&integer| integer < 0) {
            return Err(argument_error(argument, wanted, negative.to_string()));
        }
        naturals.extend(wide.iter().map(|&integer| integer as u64));
        return Ok(());
    }
    for value in iterate(values, argument)? {
        naturals.push(read_natural(&value?, argument, wanted)?);
    }
    Ok(())
}

fn iterate<'py>(
    values: &Bound<'py, PyAny>,
    argument: &str,
) -> PyResult<impl Iterator<Item = PyResult<Bound<'py, PyAny>>>> {
    let refused = || wrong_kind(values, argument, READABLE);
    let has_no_order = values.is_instance_of::<PySet>()
        || values.is_instance_of::<PyFrozenSet>()
        || values.is_instance_of::<PyDict>();
    if has_no_order { Err(refused()) } else { values.try_iter().map_err(|_| refused()) }
}

/// Copies a one-dimensional buffer of int32 or int64 to `wide`; false if it is something else.
fn read_integers(
    buffer: &PyUntypedBuffer,
    py: Python<'_>,
    wide: &mut Vec<i64>,
    narrow: &mut Vec<i32>,
) -> PyResult<bool> {
    wide.clear();
    if buffer.dimensions() != 1 || !(is_of::<i64>(buffer) || is_of::<i32>(buffer)) {
        return Ok(false);
    }
    if buffer.len_bytes() == 0 {
        return Ok(true); // its address means nothing
    }
    if is_of::<i64>(buffer) {
        wide.resize(buffer.item_count(), 0);
        buffer.as_typed::<i64>()?.copy_to_slice(py, wide)?;
    } else {
        narrow.resize(buffer.item_count(), 0);
        buffer.as_typed::<i32>()?.copy_to_slice(py, narrow)?;
        wide.extend(narrow.iter().map(|&integer| i64::from(integer)));
    }
    Ok(true)
}

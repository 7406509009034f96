//! Many integers from Python: ids, counts and token ids.
//!
//! An int32 or int64 buffer of one dimension is copied as a whole, strided or not. Any other iterable of ints is read
//! item by item, for comfort. A set or a dict is refused: its order would decide which row is whose.
//! Nothing here holds the manager's lock: iterating may run the caller's code.

use kvpager_core::TokenId;
use kvpager_core::config::MAX_TOKEN_ID;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PyInt, PySet};

use crate::arguments::{COUNT, ID, natural, read_natural, text, wrong_kind};
use crate::buffers::{NoBuffer, describe, is_of, open_buffer};
use crate::failure::argument_error;

/// What can be read, in words.
const READABLE: &str = "a 1-D buffer of int32 or int64 on the CPU, or a sequence of ints";
const TOKEN_ID: &str = "a token id in 0..2^31-1";
const LAST: u64 = i64::MAX as u64;

/// A count, or token ids.
pub(crate) enum Run {
    Count(u64),
    TokenIds(Vec<TokenId>),
}

/// The parameter `ids` of a batched call.
#[inline]
pub(crate) fn read_ids(ids: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    read(ids, "ids", ID, LAST, |id| id as u64)
}

/// The counts of a batched call, one a row.
#[inline]
pub(crate) fn read_counts(counts: &Bound<'_, PyAny>, argument: &str) -> PyResult<Vec<u64>> {
    read(counts, argument, COUNT, LAST, |count| count as u64)
}

/// The parameter `token_ids`.
#[inline]
pub(crate) fn read_token_ids(token_ids: &Bound<'_, PyAny>) -> PyResult<Vec<TokenId>> {
    read(token_ids, "token_ids", TOKEN_ID, MAX_TOKEN_ID.into(), |id| id as TokenId)
}

/// One token id.
#[inline]
pub(crate) fn read_token_id(token_id: &Bound<'_, PyAny>) -> PyResult<TokenId> {
    let number = natural(token_id, "token_id")?.filter(|&number| number <= MAX_TOKEN_ID.into());
    let number = number.ok_or_else(|| argument_error("token_id", TOKEN_ID, text(token_id)))?;
    Ok(number as TokenId)
}

/// An int is a count; an object that has a dimension holds token ids.
pub(crate) fn read_run(n: &Bound<'_, PyAny>) -> PyResult<Run> {
    let has_no_dimension = || {
        n.getattr(intern!(n.py(), "ndim")).is_ok_and(|ndim| ndim.extract().is_ok_and(|ndim: usize| ndim == 0))
    };
    if n.is_exact_instance_of::<PyInt>() || has_no_dimension() {
        return read_natural(n, "n", COUNT).map(Run::Count); // a scalar of numpy or torch has no dimension either
    }
    if open_readable(n, "token_ids")?.is_none() {
        if n.hasattr(intern!(n.py(), "__index__"))? {
            return read_natural(n, "n", COUNT).map(Run::Count);
        }
        if n.try_iter().is_err() {
            return Err(wrong_kind(n, "n", "an int or token ids"));
        }
    }
    read_token_ids(n).map(Run::TokenIds)
}

/// Integers in 0..=`last`, each a number of ones in binary; `wanted` says so in words.
#[inline]
fn read<T>(
    values: &Bound<'_, PyAny>,
    argument: &str,
    wanted: &str,
    last: u64,
    cast: impl Fn(i64) -> T,
) -> PyResult<Vec<T>> {
    if let Some(buffer) = open_readable(values, argument)? {
        return copy(&buffer, values.py(), argument, wanted, last, cast);
    }
    let refused = || wrong_kind(values, argument, READABLE);
    let has_no_order = values.is_instance_of::<PySet>()
        || values.is_instance_of::<PyFrozenSet>()
        || values.is_instance_of::<PyDict>();
    if has_no_order {
        return Err(refused());
    }
    let read_one = |value: PyResult<Bound<'_, PyAny>>| {
        let value = value?;
        let number = natural(&value, argument)?.filter(|&number| number <= last);
        number.map(|number| cast(number as i64)).ok_or_else(|| argument_error(argument, wanted, text(&value)))
    };
    values.try_iter().map_err(|_| refused())?.map(read_one).collect()
}

fn open_readable(values: &Bound<'_, PyAny>, argument: &str) -> PyResult<Option<PyUntypedBuffer>> {
    open_buffer(argument, values).map_err(|reason| match reason {
        NoBuffer::Refused(came) => argument_error(argument, READABLE, came),
        NoBuffer::Raised(error) => error,
    })
}

fn copy<T>(
    buffer: &PyUntypedBuffer,
    py: Python<'_>,
    argument: &str,
    wanted: &str,
    last: u64,
    cast: impl Fn(i64) -> T,
) -> PyResult<Vec<T>> {
    let is_readable = buffer.dimensions() == 1 && (is_of::<i64>(buffer) || is_of::<i32>(buffer));
    let integers: Vec<i64> = match (is_readable, buffer.item_size()) {
        (false, _) => return Err(argument_error(argument, READABLE, describe(buffer))),
        _ if buffer.len_bytes() == 0 => Vec::new(),
        (_, 8) => buffer.as_typed()?.to_vec(py)?,
        _ => buffer.as_typed::<i32>()?.to_vec(py)?.into_iter().map(i64::from).collect(),
    };
    // The bits of all at once, as a loop that may stop early is not vectorised.
    let bits = integers.iter().fold(0, |bits, &integer| bits | integer as u64);
    if bits & !last != 0 {
        let bad = integers.iter().find(|&&integer| integer as u64 > last);
        return Err(argument_error(argument, wanted, bad.map_or_else(String::new, i64::to_string)));
    }
    Ok(integers.into_iter().map(cast).collect())
}

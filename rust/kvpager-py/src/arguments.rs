//! Single integers and flags from Python. Out of range is an `ArgumentError` that names the parameter (never a
//! wrap-around), of another kind is a `TypeError` that names it. A bool is no integer.

use kvpager_core::config::MAX_TOKEN_ID;
use kvpager_core::{SequenceId, TokenId};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::buffers::type_name;
use crate::failure::{argument_error, config_error, slot_error};

/// What an id must be, in words.
pub(crate) const ID: &str = "an id in 0..2^63-1";
/// What a count must be, in words.
pub(crate) const COUNT: &str = "a count in 0..2^63-1";
/// What a token id must be, in words.
pub(crate) const TOKEN_ID: &str = "a token id in 0..2^31-1";

/// The integer, if it fits the type; `None` for one that does not.
#[inline]
fn integer<'py, T>(value: &Bound<'py, PyAny>, argument: &str) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    if value.is_exact_instance_of::<PyBool>() {
        return Err(wrong_kind(value, argument, "an int"));
    }
    match value.extract::<T>() {
        Ok(integer) => Ok(Some(integer)),
        Err(error) => too_large_or_no_integer(value, argument, error).map(|()| None),
    }
}

/// The value where it fits 63 bits and is not negative; `None` for any other integer.
#[inline]
fn natural(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<Option<u64>> {
    Ok(integer::<i64>(value, argument)?.and_then(|integer| u64::try_from(integer).ok()))
}

#[cold]
fn too_large_or_no_integer(value: &Bound<'_, PyAny>, argument: &str, error: PyErr) -> PyResult<()> {
    let py = value.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        Ok(())
    } else if error.is_instance_of::<PyTypeError>(py) {
        Err(wrong_kind(value, argument, "an int"))
    } else {
        Err(error) // raised by the object's own `__index__`
    }
}

/// A `TypeError`: what came is nothing of the kind that was wanted.
#[cold]
pub(crate) fn wrong_kind(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyErr {
    PyTypeError::new_err(format!("`{argument}`: wanted {wanted}, got {}", type_name(value)))
}

/// A bool.
pub(crate) fn read_flag(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<bool> {
    let flag = value.cast::<PyBool>().map_err(|_| wrong_kind(value, argument, "a bool"))?;
    Ok(flag.is_true())
}

/// An integer in 0..2⁶³−1, or an `ArgumentError` that says what was `wanted`.
#[inline]
pub(crate) fn read_natural(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyResult<u64> {
    match natural(value, argument)? {
        Some(integer) => Ok(integer),
        None => Err(argument_error(argument, wanted, text(value))),
    }
}

/// The parameter `sequence_id`.
#[inline]
pub(crate) fn read_sequence_id(value: &Bound<'_, PyAny>) -> PyResult<SequenceId> {
    read_natural(value, "sequence_id", ID)
}

/// One of the two numbers of a pool: out of range is a `ConfigError`.
pub(crate) fn read_config(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<u64> {
    natural(value, argument)?
        .ok_or_else(|| config_error(format!("`{argument}`: wanted 1 to 2^63-1, got {}", text(value))))
}

/// A position in a sequence: what can't be one is a `SlotError`.
pub(crate) fn read_position(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<u64> {
    natural(value, argument)?
        .ok_or_else(|| slot_error(format!("`{argument}`: no sequence has a position {}", text(value))))
}

/// A token id: the parameter `argument`.
#[inline]
pub(crate) fn read_token_id(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<TokenId> {
    match natural(value, argument)? {
        Some(integer) if integer <= u64::from(MAX_TOKEN_ID) => Ok(integer as TokenId),
        _ => Err(argument_error(argument, TOKEN_ID, text(value))),
    }
}

/// A number of a pool's rules, up to 2⁶⁴ − 1: out of range is a `ConfigError` that says what was `wanted`.
pub(crate) fn read_option(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyResult<u64> {
    integer(value, argument)?
        .ok_or_else(|| config_error(format!("`{argument}`: wanted {wanted}, got {}", text(value))))
}

/// An integer; `None` if it does not fit 64 bits.
pub(crate) fn read_signed(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<Option<i64>> {
    integer(value, argument)
}

/// The value as Python prints it.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> String {
    value.str().map_or_else(|_| "an integer out of range".to_owned(), |text| text.to_string())
}

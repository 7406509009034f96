//! Single integers from Python. Out of range is an `ArgumentError` that names the parameter (never a wrap-around), not
//! an integer is a `TypeError`.

use kvpager_core::config::MAX_TOKEN_ID;
use kvpager_core::{SequenceId, TokenId};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use crate::failure::{argument_error, config_error, slot_error};

/// What an id must be, in words.
pub(crate) const ID: &str = "an id in 0..2^63-1";
/// What a count must be, in words.
pub(crate) const COUNT: &str = "a count in 0..2^63-1";
/// What a token id must be, in words.
pub(crate) const TOKEN_ID: &str = "a token id in 0..2^31-1";

/// The value where it fits 63 bits and is not negative; `None` for any other integer.
#[inline]
fn natural(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<Option<u64>> {
    match value.extract::<i64>() {
        Ok(integer) => Ok(u64::try_from(integer).ok()),
        Err(error) => too_large_or_no_integer(value, argument, error),
    }
}

#[cold]
fn too_large_or_no_integer(value: &Bound<'_, PyAny>, argument: &str, error: PyErr) -> PyResult<Option<u64>> {
    let py = value.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        Ok(None)
    } else if error.is_instance_of::<PyTypeError>(py) {
        let came = value.get_type().name()?;
        Err(PyTypeError::new_err(format!("`{argument}`: wanted an int, got {came}")))
    } else {
        Err(error) // raised by the object's own `__index__`
    }
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
    match value.extract::<u64>() {
        Ok(integer) => Ok(integer),
        Err(error) => {
            too_large_or_no_integer(value, argument, error)?;
            Err(config_error(format!("`{argument}`: wanted {wanted}, got {}", text(value))))
        }
    }
}

/// An integer; `None` if it does not fit 64 bits.
pub(crate) fn read_signed(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<Option<i64>> {
    match value.extract::<i64>() {
        Ok(integer) => Ok(Some(integer)),
        Err(error) => too_large_or_no_integer(value, argument, error).map(|_| None),
    }
}

/// The value as Python prints it.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> String {
    value.str().map_or_else(|_| "an integer out of range".to_owned(), |text| text.to_string())
}

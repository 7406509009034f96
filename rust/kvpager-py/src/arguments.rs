//! Single integers and flags from Python. Out of range is an `ArgumentError` that names the parameter (never a
//! wrap-around), another kind is a `TypeError` that names it. A bool is no integer.

use kvpager_core::{BlockId, SequenceId};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::failure::{argument_error, config_error, slot_error};

/// What an id must be, in words.
pub(crate) const ID: &str = "an id in 0..2^63-1";
/// What a count must be, in words.
pub(crate) const COUNT: &str = "a count in 0..2^63-1";

/// The integer, if it fits the type; `None` if it does not.
#[inline]
pub(crate) fn integer<'py, T>(value: &Bound<'py, PyAny>, argument: &str) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    if value.is_exact_instance_of::<PyBool>() {
        return Err(wrong_kind(value, argument, "an int"));
    }
    let py = value.py();
    match value.extract::<T>() {
        Ok(integer) => Ok(Some(integer)),
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => Ok(None),
        Err(error) if error.is_instance_of::<PyTypeError>(py) => Err(wrong_kind(value, argument, "an int")),
        Err(error) => Err(error), // raised by the object's own `__index__`
    }
}

/// The integer, if it lies in 0..2⁶³−1; `None` if it does not.
#[inline]
pub(crate) fn natural(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<Option<u64>> {
    Ok(integer::<i64>(value, argument)?.and_then(|integer| u64::try_from(integer).ok()))
}

/// An integer in 0..2⁶³−1, or an `ArgumentError` that says what was `wanted`.
#[inline]
pub(crate) fn read_natural(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyResult<u64> {
    natural(value, argument)?.ok_or_else(|| argument_error(argument, wanted, text(value)))
}

/// An integer in 0..=`last`, or an `ArgumentError` that says what was `wanted`.
#[inline]
pub(crate) fn read_up_to(
    value: &Bound<'_, PyAny>,
    argument: &str,
    last: u32,
    wanted: &str,
) -> PyResult<BlockId> {
    let number = natural(value, argument)?.and_then(|number| u32::try_from(number).ok());
    number.filter(|&number| number <= last).ok_or_else(|| argument_error(argument, wanted, text(value)))
}

/// The parameter `sequence_id`.
#[inline]
pub(crate) fn read_sequence_id(value: &Bound<'_, PyAny>) -> PyResult<SequenceId> {
    read_natural(value, "sequence_id", ID)
}

/// A position in a sequence: an integer that can't be one is a `SlotError`.
pub(crate) fn read_position(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<u64> {
    let position = natural(value, argument)?;
    position.ok_or_else(|| slot_error(format!("`{argument}`: no sequence has a position {}", text(value))))
}

/// A number of a pool's rules, 0..=`last`: out of range is a `ConfigError` that says what was `wanted`.
pub(crate) fn read_config(
    value: &Bound<'_, PyAny>,
    argument: &str,
    last: u64,
    wanted: &str,
) -> PyResult<u64> {
    let number = integer::<u64>(value, argument)?.filter(|&number| number <= last);
    number.ok_or_else(|| config_error(format!("`{argument}`: wanted {wanted}, got {}", text(value))))
}

/// A bool.
pub(crate) fn read_flag(value: &Bound<'_, PyAny>, argument: &str) -> PyResult<bool> {
    let flag = value.cast::<PyBool>().map_err(|_| wrong_kind(value, argument, "a bool"))?;
    Ok(flag.is_true())
}

/// A `TypeError`: `value` is of another kind than was `wanted`.
#[cold]
pub(crate) fn wrong_kind(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyErr {
    PyTypeError::new_err(format!("`{argument}`: wanted {wanted}, got {}", type_name(value)))
}

/// The value as Python prints it.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> String {
    value.str().map_or_else(|_| "an integer out of range".to_owned(), |text| text.to_string())
}

pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

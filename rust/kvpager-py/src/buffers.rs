//! Arrays from and to Python: ids and counts are read, slots, tables and lengths written.
//!
//! A buffer (a numpy array, an `array`, a CPU tensor through its `.numpy()`) is read in one copy, about 0.2 µs for
//! 2,048 integers; any other iterable of ints is accepted for comfort and read once, about 10 µs. Nothing here holds the
//! manager's lock: iterating may run the caller's code.

use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::{read_natural, text};
use crate::failure::argument_error;

const READABLE: &str = "a contiguous 1-D buffer of int32 or int64 on the CPU, or a sequence of ints";

/// Memory for the arrays of one call, kept between calls so that a step allocates nothing.
#[derive(Default)]
pub(crate) struct Arrays {
    pub(crate) ids: Vec<u64>,
    pub(crate) counts: Vec<u64>,
    pub(crate) slots: Vec<i64>,
    pub(crate) entries: Vec<i32>,
    wide: Vec<i64>,
    narrow: Vec<i32>,
}

impl Arrays {
    /// Reads the ids of a batched call.
    pub(crate) fn read_ids(&mut self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        read_naturals(ids, "ids", crate::arguments::ID, &mut self.ids, &mut self.wide, &mut self.narrow)
    }

    /// Reads the counts of a batched call.
    pub(crate) fn read_counts(&mut self, counts: &Bound<'_, PyAny>) -> PyResult<()> {
        let wanted = crate::arguments::COUNT;
        read_naturals(counts, "counts", wanted, &mut self.counts, &mut self.wide, &mut self.narrow)
    }
}

fn read_naturals(
    values: &Bound<'_, PyAny>,
    argument: &str,
    wanted: &str,
    naturals: &mut Vec<u64>,
    wide: &mut Vec<i64>,
    narrow: &mut Vec<i32>,
) -> PyResult<()> {
    naturals.clear();
    if let Some(buffer) = open_buffer(values, argument, READABLE)? {
        let py = values.py();
        let refuse = || argument_error(argument, READABLE, describe(&buffer));
        if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
            return Err(refuse());
        }
        if let Ok(integers) = buffer.as_typed::<i64>() {
            wide.resize(integers.item_count(), 0);
            integers.copy_to_slice(py, wide)?;
        } else if let Ok(integers) = buffer.as_typed::<i32>() {
            narrow.resize(integers.item_count(), 0);
            integers.copy_to_slice(py, narrow)?;
            wide.clear();
            wide.extend(narrow.iter().map(|&integer| i64::from(integer)));
        } else {
            return Err(refuse());
        }
        if let Some(negative) = wide.iter().find(|&&integer| integer < 0) {
            return Err(argument_error(argument, wanted, negative.to_string()));
        }
        naturals.extend(wide.iter().map(|&integer| integer as u64));
        return Ok(());
    }
    let iterator = values.try_iter().map_err(|_| {
        let came =
            values.get_type().name().map_or_else(|_| "something else".to_owned(), |name| name.to_string());
        PyTypeError::new_err(format!("`{argument}`: wanted {READABLE}, got {came}"))
    })?;
    for value in iterator {
        naturals.push(read_natural(&value?, argument, wanted)?);
    }
    Ok(())
}

/// The caller's memory for an answer of type `T`: writable and contiguous, on the CPU. The caller of this function checks
/// its size. While it is open the memory can be neither resized nor freed.
pub(crate) fn open_out<T: Element>(out: &Bound<'_, PyAny>, wanted: &str) -> PyResult<PyBuffer<T>> {
    let Some(buffer) = open_buffer(out, "out", wanted)? else {
        let came = out.get_type().name()?.to_string();
        return Err(argument_error("out", wanted, came));
    };
    let described = describe(&buffer);
    let usable = !buffer.readonly() && buffer.is_c_contiguous();
    match buffer.into_typed::<T>() {
        Ok(typed) if usable => Ok(typed),
        _ => Err(argument_error("out", wanted, described)),
    }
}

/// What a buffer is, for a message.
pub(crate) fn describe(buffer: &PyUntypedBuffer) -> String {
    let access = if buffer.readonly() { "a read-only" } else { "a" };
    let strided = if buffer.is_c_contiguous() { "" } else { " strided" };
    let format = buffer.format().to_string_lossy();
    format!("{access}{strided} buffer of shape {:?} and format `{format}`", buffer.shape())
}

/// The buffer of an array or of a CPU tensor; `None` for what has none.
fn open_buffer(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyResult<Option<PyUntypedBuffer>> {
    if value.is_exact_instance_of::<PyList>() || value.is_exact_instance_of::<PyTuple>() {
        return Ok(None);
    }
    let py = value.py();
    let refuse = |error: PyErr| argument_error(argument, wanted, text(error.value(py).as_any()));
    match PyUntypedBuffer::get(value) {
        Ok(buffer) => return Ok(Some(buffer)),
        Err(error) if !error.is_instance_of::<PyTypeError>(py) => return Err(refuse(error)),
        Err(_) => {} // exports no buffer
    }
    // torch tensors export none themselves, but lend their memory through numpy.
    let Ok(view) = value.getattr(intern!(py, "numpy")) else { return Ok(None) };
    let array = view.call0().map_err(|error| {
        let about_the_tensor =
            error.is_instance_of::<PyTypeError>(py) || error.is_instance_of::<PyRuntimeError>(py);
        if about_the_tensor { refuse(error) } else { error }
    })?;
    PyUntypedBuffer::get(&array).map(Some).map_err(refuse)
}

//! Arrays from and to Python: ids and counts are read, slots, tables and lengths written.
//!
//! A buffer (a numpy array, an `array`, a CPU tensor through its `.numpy()`) is read in one copy, strided or not, about
//! 0.2 µs for 2,048 integers; any other iterable of ints is accepted for comfort and read once, about 10 µs. Nothing
//! here holds the manager's lock: iterating may run the caller's code.

use std::marker::PhantomData;
use std::ptr::NonNull;

use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use kvpager_core::TokenId;
use kvpager_core::config::MAX_TOKEN_ID;

use crate::arguments::{COUNT, ID, TOKEN_ID, read_natural, read_token_id, text};
use crate::failure::argument_error;

const READABLE: &str = "a 1-D buffer of int32 or int64 on the CPU, or a sequence of ints";

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
        let buffer = open_buffer(token_ids).map_err(|reason| match reason {
            NoBuffer::Refused(came) => argument_error("token_ids", READABLE, came),
            NoBuffer::Raised(error) => error,
        })?;
        self.read_opened_token_ids(token_ids, buffer)
    }

    /// Reads an int (a count) or what has a dimension (token ids, to `token_ids`).
    pub(crate) fn read_count_or_token_ids(&mut self, n: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let ndim = || n.getattr(intern!(n.py(), "ndim")).and_then(|ndim| ndim.extract::<usize>());
        if n.is_exact_instance_of::<PyInt>() || ndim().is_ok_and(|ndim| ndim == 0) {
            return read_natural(n, "n", COUNT).map(Some); // a scalar of numpy or torch has no dimension either
        }
        let buffer = open_buffer(n).map_err(|reason| match reason {
            NoBuffer::Refused(came) => argument_error("token_ids", READABLE, came),
            NoBuffer::Raised(error) => error,
        })?;
        if buffer.is_none() && n.hasattr(intern!(n.py(), "__index__"))? {
            return read_natural(n, "n", COUNT).map(Some);
        }
        if buffer.is_none() && n.try_iter().is_err() {
            return Err(PyTypeError::new_err(format!(
                "`n`: wanted an int or token ids, got {}",
                type_name(n)
            )));
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
            let iterator = values.try_iter().map_err(|_| {
                PyTypeError::new_err(format!("`token_ids`: wanted {READABLE}, got {}", type_name(values)))
            })?;
            for value in iterator {
                token_ids.push(read_token_id(&value?, "token_ids")?);
            }
            return Ok(());
        };
        if !read_integers(&buffer, py, &mut self.wide, &mut self.narrow)? {
            return Err(argument_error("token_ids", READABLE, describe(&buffer)));
        }
        // All bits at once: a negative or too large id shows in the upper half or the sign of the lower one.
        let bits = self.wide.iter().fold(0, |bits, &integer| bits | integer);
        if bits as u64 > u64::from(MAX_TOKEN_ID) {
            let is_id = |integer: i64| TokenId::try_from(integer).is_ok_and(|id| id <= MAX_TOKEN_ID);
            let bad = self.wide.iter().find(|&&integer| !is_id(integer)).copied().unwrap_or_default();
            return Err(argument_error("token_ids", TOKEN_ID, bad.to_string()));
        }
        token_ids.extend(self.wide.iter().map(|&integer| integer as TokenId));
        Ok(())
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
    let buffer = open_buffer(values).map_err(|reason| match reason {
        NoBuffer::Refused(came) => argument_error(argument, READABLE, came),
        NoBuffer::Raised(error) => error,
    })?;
    if let Some(buffer) = buffer {
        if !read_integers(&buffer, values.py(), wide, narrow)? {
            return Err(argument_error(argument, READABLE, describe(&buffer)));
        }
        if let Some(negative) = wide.iter().find(|&&integer| integer < 0) {
            return Err(argument_error(argument, wanted, negative.to_string()));
        }
        naturals.extend(wide.iter().map(|&integer| integer as u64));
        return Ok(());
    }
    let iterator = values.try_iter().map_err(|_| {
        PyTypeError::new_err(format!("`{argument}`: wanted {READABLE}, got {}", type_name(values)))
    })?;
    for value in iterator {
        naturals.push(read_natural(&value?, argument, wanted)?);
    }
    Ok(())
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

/// The caller's memory for an answer of type `T`: writable, contiguous, on the CPU. While it is open it can be neither
/// resized nor freed.
pub(crate) struct Out<T> {
    buffer: PyUntypedBuffer,
    element: PhantomData<T>,
}

impl<T: Element> Out<T> {
    /// Opens `out`; the caller of this function checks its size. `wanted` says what would have been accepted.
    pub(crate) fn open(out: &Bound<'_, PyAny>, wanted: impl Fn() -> String) -> PyResult<Self> {
        Self::open_named("out", out, wanted)
    }

    /// Opens a buffer that came under another name.
    pub(crate) fn open_named(
        argument: &str,
        out: &Bound<'_, PyAny>,
        wanted: impl Fn() -> String,
    ) -> PyResult<Self> {
        let came = match open_buffer(out) {
            Ok(Some(buffer)) => {
                if is_of::<T>(&buffer) && !buffer.readonly() && buffer.is_c_contiguous() {
                    return Ok(Self { buffer, element: PhantomData });
                }
                describe(&buffer)
            }
            Ok(None) => type_name(out),
            Err(NoBuffer::Refused(came)) => came,
            Err(NoBuffer::Raised(error)) => return Err(error),
        };
        Err(argument_error(argument, &wanted(), came))
    }

    /// Opens `out` for exactly `num_elements` values; `kind` is their type in words.
    pub(crate) fn open_exact(out: &Bound<'_, PyAny>, kind: &str, num_elements: u64) -> PyResult<Self> {
        let wanted = || format!("a writable, contiguous {kind} buffer of {num_elements} elements on the CPU");
        let target = Self::open(out, wanted)?;
        if target.len() as u64 == num_elements {
            return Ok(target);
        }
        Err(argument_error("out", &wanted(), target.describe()))
    }

    pub(crate) fn len(&self) -> usize {
        self.buffer.item_count()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// Where its values begin, aligned; dangling if it has none.
    pub(crate) fn start(&self) -> NonNull<T> {
        let start = NonNull::new(self.buffer.buf_ptr().cast::<T>()).filter(|_| self.len() > 0);
        start.unwrap_or_else(NonNull::dangling)
    }

    /// What it is, for a message.
    pub(crate) fn describe(&self) -> String {
        describe(&self.buffer)
    }

    /// Fills its front; there is room for `values`, and the rest stays as it is.
    pub(crate) fn fill_front(&self, py: Python<'_>, values: &[T]) -> PyResult<()> {
        if values.len() == self.len() {
            return self.fill(py, values);
        }
        let memory =
            self.buffer.as_typed::<T>()?.as_slice_ptr().filter(|memory| memory.len() >= values.len());
        if let Some(memory) = memory {
            // SAFETY: `memory` is that of a writable, contiguous buffer of elements of this type, has room for the
            // values, and stays where it is while the buffer is open; `values` is our own, so they don't overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(values.as_ptr(), memory.as_ptr().cast::<T>(), values.len());
            }
        }
        Ok(())
    }

    /// Fills it with as many values as it has room for.
    pub(crate) fn fill(&self, py: Python<'_>, values: &[T]) -> PyResult<()> {
        if self.len() == 0 && values.is_empty() {
            return Ok(()); // its address means nothing
        }
        self.buffer.as_typed::<T>()?.copy_from_slice(py, values)
    }
}

/// Whether the elements are of this type, aligned and in this machine's byte order. (pyo3 0.30 takes the prefix `>`
/// for its own on little-endian machines, so the order is looked at here.)
fn is_of<T: Element>(buffer: &PyUntypedBuffer) -> bool {
    let format = buffer.format();
    let is_native = !matches!(format.to_bytes(), [b'<' | b'>' | b'!', ..]);
    let is_aligned = buffer.len_bytes() == 0 || buffer.buf_ptr().cast::<T>().is_aligned();
    is_native && is_aligned && buffer.item_size() == size_of::<T>() && T::is_compatible_format(format)
}

/// What a buffer is, for a message.
fn describe(buffer: &PyUntypedBuffer) -> String {
    let access = if buffer.readonly() { "a read-only" } else { "a" };
    let strided = if buffer.is_c_contiguous() { "" } else { " strided" };
    let format = buffer.format().to_string_lossy();
    format!("{access}{strided} buffer of shape {:?} and format `{format}`", buffer.shape())
}

/// Why something that could have a buffer lends none.
enum NoBuffer {
    /// It said no: in words, what it is and why.
    Refused(String),
    /// Asking raised something else, which goes on to the caller.
    Raised(PyErr),
}

/// The buffer of an array or of a CPU tensor; `None` for what has none.
fn open_buffer(value: &Bound<'_, PyAny>) -> Result<Option<PyUntypedBuffer>, NoBuffer> {
    if value.is_exact_instance_of::<PyList>() || value.is_exact_instance_of::<PyTuple>() {
        return Ok(None);
    }
    let py = value.py();
    let refused = |error: PyErr| {
        NoBuffer::Refused(format!("{} ({})", type_name(value), text(error.value(py).as_any())))
    };
    match PyUntypedBuffer::get(value) {
        Ok(buffer) => return Ok(Some(buffer)),
        Err(error) if !error.is_instance_of::<PyTypeError>(py) => return Err(refused(error)),
        Err(_) => {} // exports no buffer
    }
    // torch tensors export none themselves, but lend their memory through numpy.
    let Ok(view) = value.getattr(intern!(py, "numpy")) else { return Ok(None) };
    let array = view.call0().map_err(|error| {
        let about_the_tensor =
            error.is_instance_of::<PyTypeError>(py) || error.is_instance_of::<PyRuntimeError>(py);
        if about_the_tensor { refused(error) } else { NoBuffer::Raised(error) }
    })?;
    PyUntypedBuffer::get(&array).map(Some).map_err(refused)
}

fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

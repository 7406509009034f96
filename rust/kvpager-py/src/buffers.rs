//! Buffers of Python objects: numpy arrays, `array`, memoryviews, CPU tensors through their `.numpy()`.

use std::ptr::NonNull;

use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::text;
use crate::failure::argument_error;

/// What can be read, in words.
pub(crate) const READABLE: &str = "a 1-D buffer of int32 or int64 on the CPU, or a sequence of ints";
/// What a tensor must be, in words.
const LENDABLE: &str = "a tensor on the CPU that numpy can view";

/// The caller's memory for answers of type `T`: writable, contiguous, on the CPU. While it is held it can be neither
/// resized nor freed.
pub(crate) struct Held<T> {
    buffer: PyUntypedBuffer,
    start: NonNull<T>,
    len: usize,
}

// SAFETY: `start` is only a cached address of `buffer`, which may be held and released from any thread; who reads or
// writes through it keeps to the rule of `slice`.
unsafe impl<T: Send> Send for Held<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Held<T> {}

impl<T: Element> Held<T> {
    /// Opens the buffer that came as `argument`; the caller of this function checks its size. `wanted` says what would
    /// have been accepted.
    pub(crate) fn open(
        argument: &str,
        value: &Bound<'_, PyAny>,
        wanted: impl Fn() -> String,
    ) -> PyResult<Self> {
        let came = match open_buffer(argument, value) {
            Ok(Some(buffer)) => {
                if is_of::<T>(&buffer) && !buffer.readonly() && buffer.is_c_contiguous() {
                    // What has no elements has no address that means anything.
                    let (start, len) = (NonNull::new(buffer.buf_ptr().cast::<T>()), buffer.item_count());
                    let start = start.filter(|_| len > 0).unwrap_or_else(NonNull::dangling);
                    return Ok(Self { buffer, start, len });
                }
                describe(&buffer)
            }
            Ok(None) => type_name(value),
            Err(NoBuffer::Refused(came)) => came,
            Err(NoBuffer::Raised(error)) => return Err(error),
        };
        Err(argument_error(argument, &wanted(), came))
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// What it is, for a message.
    pub(crate) fn describe(&self) -> String {
        describe(&self.buffer)
    }

    /// First and last address, exclusive; `None` if it is empty.
    pub(crate) fn span(&self) -> Option<(usize, usize)> {
        let start = self.start.as_ptr() as usize;
        (self.len > 0).then(|| (start, start + self.len * size_of::<T>()))
    }

    /// # Safety
    /// No other slice over this buffer may exist meanwhile. Whoever else touches the memory, from Python or a device,
    /// races as with any buffer.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "the memory is the caller's, not a field")]
    pub(crate) unsafe fn slice(&self) -> &mut [T] {
        // SAFETY: `buffer` vouches for so many aligned, initialised, writable values from `start` on (dangling if there
        // are none) for as long as it is held; the caller for exclusiveness.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Whether the elements are of this type, aligned and in this machine's byte order. (pyo3 0.30 takes the prefix `>`
/// for its own on little-endian machines, so the order is looked at here.)
pub(crate) fn is_of<T: Element>(buffer: &PyUntypedBuffer) -> bool {
    let format = buffer.format();
    let is_native = !matches!(format.to_bytes(), [b'<' | b'>' | b'!', ..]);
    let is_aligned = buffer.len_bytes() == 0 || buffer.buf_ptr().cast::<T>().is_aligned();
    is_native && is_aligned && buffer.item_size() == size_of::<T>() && T::is_compatible_format(format)
}

/// What a buffer is, for a message.
pub(crate) fn describe(buffer: &PyUntypedBuffer) -> String {
    let access = if buffer.readonly() { "a read-only" } else { "a" };
    let strided = if buffer.is_c_contiguous() { "" } else { " strided" };
    let format = buffer.format().to_string_lossy();
    format!("{access}{strided} buffer of shape {:?} and format `{format}`", buffer.shape())
}

/// The buffer of an array of ids or counts; `None` for what has none and may be iterated.
pub(crate) fn open_readable(argument: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<PyUntypedBuffer>> {
    open_buffer(argument, value).map_err(|reason| match reason {
        NoBuffer::Refused(came) => argument_error(argument, READABLE, came),
        NoBuffer::Raised(error) => error,
    })
}

/// Why something that could have a buffer lends none.
enum NoBuffer {
    /// It said no: in words, what it is and why.
    Refused(String),
    /// An error that goes on to the caller.
    Raised(PyErr),
}

/// The buffer of an array or of a CPU tensor; `None` for what has none.
fn open_buffer(argument: &str, value: &Bound<'_, PyAny>) -> Result<Option<PyUntypedBuffer>, NoBuffer> {
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
        match describe_tensor(value) {
            Ok(came) if about_the_tensor => NoBuffer::Raised(argument_error(argument, LENDABLE, came)),
            Err(_) if about_the_tensor => refused(error),
            _ => NoBuffer::Raised(error),
        }
    })?;
    PyUntypedBuffer::get(&array).map(Some).map_err(refused)
}

/// What a tensor is that lends no memory, for a message.
fn describe_tensor(tensor: &Bound<'_, PyAny>) -> PyResult<String> {
    let (dtype, device) = (tensor.getattr("dtype")?, tensor.getattr("device")?);
    let grad = if tensor.getattr("requires_grad")?.is_truthy()? { " that requires grad" } else { "" };
    Ok(format!("a {} tensor on {}{grad}", text(&dtype), text(&device)))
}

pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

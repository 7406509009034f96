//! Memory of Python objects: numpy arrays, `array`, memoryviews, CPU tensors through their `.numpy()`.
//!
//! The buffer protocol is the only way in. It costs about 0.1 µs for an array, and torch takes about 1 µs to make an
//! array of a tensor. While a buffer is held, its memory can be neither resized nor freed.

use std::marker::PhantomData;

use kvpager_core::Error;
use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::{text, type_name};
use crate::failure::argument_error;

/// What a tensor must be, in words.
const LENDABLE: &str = "a tensor on the CPU that numpy can view";

/// The caller's memory for answers of type `T`: writable, C-contiguous, on the CPU.
pub(crate) struct Out<T> {
    buffer: PyUntypedBuffer,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Out<T> {
    /// Opens the memory that came as `argument`, if its shape `fits`; `wanted` says in words what does.
    pub(crate) fn open(
        argument: &str,
        value: &Bound<'_, PyAny>,
        wanted: impl FnOnce() -> String,
        fits: impl FnOnce(&[usize]) -> bool,
    ) -> PyResult<Self> {
        let came = match open_buffer(argument, value) {
            Ok(Some(buffer)) => {
                let is_right = is_of::<T>(&buffer) && !buffer.readonly() && buffer.is_c_contiguous();
                if is_right && fits(buffer.shape()) {
                    return Ok(Self { len: buffer.item_count(), buffer, element: PhantomData });
                }
                describe(&buffer)
            }
            Ok(None) => type_name(value),
            Err(NoBuffer::Refused(came)) => came,
            Err(NoBuffer::Raised(error)) => return Err(error),
        };
        Err(argument_error(argument, &wanted(), came))
    }

    /// Opens `out` for exactly `num_elements` values; `kind` is their type in words.
    #[inline]
    pub(crate) fn open_exact(value: &Bound<'_, PyAny>, kind: &str, num_elements: u64) -> PyResult<Self> {
        let wanted = || format!("a writable, contiguous {kind} buffer of {num_elements} elements on the CPU");
        Self::open("out", value, wanted, |shape| shape.iter().product::<usize>() as u64 == num_elements)
    }

    /// Elements.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// The core's error for an `out` that turned out too small.
    pub(crate) fn too_small(&self, wanted: String) -> Error {
        Error::Argument { argument: "out", wanted, got: describe(&self.buffer) }
    }

    /// First and last address, exclusive; `None` if it is empty.
    pub(crate) fn span(&self) -> Option<(usize, usize)> {
        let start = self.buffer.buf_ptr() as usize;
        (self.len > 0).then(|| (start, start + self.buffer.len_bytes()))
    }

    /// Copies `answer`, which has room, to the front.
    #[inline]
    pub(crate) fn write(&self, _attached: Python<'_>, answer: &[T]) {
        // SAFETY: this thread keeps the interpreter, runs no Python and makes no other slice meanwhile.
        let memory = unsafe { self.slice() };
        memory[..answer.len()].copy_from_slice(answer);
    }

    /// # Safety
    /// No other slice over this memory may exist meanwhile. Whoever else touches the memory, from Python or a device,
    /// races as with any buffer.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "the memory is the caller's, not a field")]
    pub(crate) unsafe fn slice(&self) -> &mut [T] {
        if self.len == 0 {
            return &mut []; // the address of an empty buffer means nothing
        }
        // SAFETY: `open` has found so many aligned, writable values of this type without gaps, and they stay for as
        // long as the buffer is held. The caller vouches for exclusiveness.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.buf_ptr().cast(), self.len) }
    }
}

/// Whether the elements are of this type, aligned and in this machine's byte order. (pyo3 0.30 takes the prefix `>`
/// for its own on little-endian machines, so the order is looked at here.)
pub(crate) fn is_of<T: Element>(buffer: &PyUntypedBuffer) -> bool {
    let format = buffer.format();
    let is_native = !matches!(format.to_bytes(), [b'<' | b'>' | b'!', ..]);
    // The address of an empty buffer means nothing.
    let is_aligned = buffer.len_bytes() == 0 || buffer.buf_ptr().cast::<T>().is_aligned();
    is_native && is_aligned && buffer.item_size() == size_of::<T>() && T::is_compatible_format(format)
}

/// What a buffer is, for a message. Runs no Python.
pub(crate) fn describe(buffer: &PyUntypedBuffer) -> String {
    let access = if buffer.readonly() { "a read-only" } else { "a" };
    let strided = if buffer.is_c_contiguous() { "" } else { " strided" };
    let format = buffer.format().to_string_lossy();
    format!("{access}{strided} buffer of shape {:?} and format `{format}`", buffer.shape())
}

/// Why an object that could have a buffer lends none.
pub(crate) enum NoBuffer {
    /// It said no: in words, what it is and why.
    Refused(String),
    /// An error that goes on to the caller.
    Raised(PyErr),
}

/// The buffer of an array or of a CPU tensor; `None` for an object that has none.
pub(crate) fn open_buffer(
    argument: &str,
    value: &Bound<'_, PyAny>,
) -> Result<Option<PyUntypedBuffer>, NoBuffer> {
    if value.is_exact_instance_of::<PyList>() || value.is_exact_instance_of::<PyTuple>() {
        return Ok(None);
    }
    let py = value.py();
    let refused = |error: PyErr| {
        NoBuffer::Refused(format!("{} ({})", type_name(value), text(error.value(py).as_any())))
    };
    // SAFETY: only asks whether the object's class has the slot.
    if unsafe { pyo3::ffi::PyObject_CheckBuffer(value.as_ptr()) } == 1 {
        return PyUntypedBuffer::get(value).map(Some).map_err(refused);
    }
    // torch tensors export no buffer themselves, but lend their memory through numpy.
    let lent = match value.call_method0(intern!(py, "numpy")) {
        Ok(array) => return PyUntypedBuffer::get(&array).map(Some).map_err(refused),
        Err(error) => error,
    };
    if !value.hasattr(intern!(py, "numpy")).map_err(NoBuffer::Raised)? {
        return Ok(None);
    }
    let about_the_tensor =
        lent.is_instance_of::<PyTypeError>(py) || lent.is_instance_of::<PyRuntimeError>(py);
    Err(match describe_tensor(value) {
        Ok(came) if about_the_tensor => NoBuffer::Raised(argument_error(argument, LENDABLE, came)),
        Err(_) if about_the_tensor => refused(lent),
        _ => NoBuffer::Raised(lent),
    })
}

/// What a tensor is that lends no memory, for a message.
fn describe_tensor(tensor: &Bound<'_, PyAny>) -> PyResult<String> {
    let (dtype, device) = (tensor.getattr("dtype")?, tensor.getattr("device")?);
    let grad = if tensor.getattr("requires_grad")?.is_truthy()? { " that requires grad" } else { "" };
    Ok(format!("a {} tensor on {}{grad}", text(&dtype), text(&device)))
}

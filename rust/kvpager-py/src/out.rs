//! Where an answer goes: the caller's memory, looked at in place if it can be, held through its buffer if not; or a new
//! tensor. torch is imported where one is made, never before.

use pyo3::buffer::Element;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arguments::{text, wrong_kind};
use crate::buffers::Held;
use crate::failure::argument_error;
use crate::memory::{self, Seen};

/// An `out`: writable, contiguous, on the CPU. From opening it until the answer is written no Python may run.
pub(crate) enum Out<'a, 'py, T> {
    /// Not held: true while this thread keeps the interpreter.
    Seen(&'a Bound<'py, PyAny>, Seen),
    /// Can be neither resized nor freed.
    Held(Held<T>),
}

impl<'a, 'py, T: Element> Out<'a, 'py, T> {
    /// Opens `out`; the caller of this function checks its size. `wanted` says what would have been accepted.
    #[inline]
    pub(crate) fn open(out: &'a Bound<'py, PyAny>, wanted: impl Fn() -> String) -> PyResult<Self> {
        match memory::look(out) {
            Some(seen) if seen.can_take::<T>() => Ok(Self::Seen(out, seen)),
            _ => Held::open("out", out, wanted).map(Self::Held),
        }
    }

    /// Opens `out` for exactly `num_elements` values; `kind` is their type in words.
    #[inline]
    pub(crate) fn open_exact(out: &'a Bound<'py, PyAny>, kind: &str, num_elements: u64) -> PyResult<Self> {
        let wanted = || format!("a writable, contiguous {kind} buffer of {num_elements} elements on the CPU");
        let target = Self::open(out, wanted)?;
        if target.len() as u64 == num_elements {
            return Ok(target);
        }
        Err(argument_error("out", &wanted(), target.describe()))
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Seen(_, seen) => seen.len(),
            Self::Held(held) => held.len(),
        }
    }

    /// Rows, if it has two dimensions.
    pub(crate) fn rows_of_two(&self) -> Option<usize> {
        match self {
            Self::Seen(_, seen) => seen.rows_of_two(),
            Self::Held(held) => <[usize; 2]>::try_from(held.shape()).ok().map(|[num_rows, _]| num_rows),
        }
    }

    /// What it is, for a message.
    pub(crate) fn describe(self) -> String {
        self.hold().map_or_else(|error| error.to_string(), |held| held.describe())
    }

    /// Holds it, so that the interpreter may be let go of. What it had room for it has still.
    pub(crate) fn hold(self) -> PyResult<Held<T>> {
        let (out, seen) = match self {
            Self::Seen(out, seen) => (out, seen),
            Self::Held(held) => return Ok(held),
        };
        let wanted = || format!("a writable, contiguous buffer of {} elements on the CPU", seen.len());
        let held = Held::open("out", out, wanted)?;
        if held.len() == seen.len() {
            return Ok(held);
        }
        Err(argument_error("out", &wanted(), held.describe())) // another thread has resized it
    }
}

/// Refuses a `device` that came together with an `out`.
#[inline]
pub(crate) fn refuse_device(device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    device.map_or(Ok(()), |device| Err(argument_error("device", "None together with `out`", text(device))))
}

/// A new tensor, the CPU's if there is no `device`. `kind` is the name of its type.
///
/// A `device` that torch does not have here is an `ArgumentError`, what names none a `TypeError`, each with torch's own
/// words as its cause; a full device is torch's error itself.
pub(crate) fn new_tensor<'py>(
    py: Python<'py>,
    shape: &[u64],
    kind: &str,
    device: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let torch = py.import(intern!(py, "torch"))?;
    let options = PyDict::new(py);
    options.set_item(intern!(py, "dtype"), torch.getattr(kind)?)?;
    // Never torch's default device, which need not be the CPU.
    match device {
        Some(device) => options.set_item(intern!(py, "device"), device)?,
        None => options.set_item(intern!(py, "device"), intern!(py, "cpu"))?,
    }
    let make = |shape| torch.call_method(intern!(py, "empty"), (shape,), Some(&options));
    make(PyTuple::new(py, shape)?).map_err(|error| match (device, make(PyTuple::empty(py))) {
        (Some(device), Err(about_the_device)) => {
            let named = if about_the_device.is_instance_of::<PyTypeError>(py) {
                wrong_kind(device, "device", "a torch.device, a str or an int")
            } else {
                argument_error("device", "a device that torch has here", text(device))
            };
            named.set_cause(py, Some(about_the_device));
            named
        }
        _ => error,
    })
}

/// A new tensor, which `fill` writes. It is made first: a device may be missing, or full.
pub(crate) fn fill_new<'py>(
    py: Python<'py>,
    shape: &[u64],
    kind: &str,
    device: Option<&Bound<'py, PyAny>>,
    fill: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<Bound<'py, PyAny>> {
    let tensor = new_tensor(py, shape, kind, device)?;
    if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        fill(&tensor)?;
        return Ok(tensor);
    }
    let host = new_tensor(py, shape, kind, None)?;
    fill(&host)?;
    tensor.call_method1(intern!(py, "copy_"), (host,))
}

//! New torch tensors for answers. torch is imported where one is made, never before.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arguments::{text, wrong_kind};
use crate::failure::argument_error;

/// Refuses a `device` that came together with an `out`.
#[inline]
pub(crate) fn refuse_device(device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    device.map_or(Ok(()), |device| Err(argument_error("device", "None together with `out`", text(device))))
}

/// A new tensor, the CPU's if there is no `device`. `kind` is the name of its type.
///
/// A `device` that torch does not have here is an `ArgumentError`, a value that names none a `TypeError`, each with
/// torch's own words as its cause; a full device is torch's error itself.
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

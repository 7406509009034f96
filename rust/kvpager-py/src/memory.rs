//! Where the integers of a numpy array or a torch tensor lie, found without a call into Python.
//!
//! Asking through the buffer protocol costs 0.1 µs for an array and 1 µs for a tensor, which makes an array first. Both
//! tell C code where their memory is: an array by the layout of its object, which is numpy's C interface and the same in
//! 1.x and 2.x; a tensor by the function table of `DLPack` that its class has. That is used for objects of exactly these
//! two classes with native, aligned, C-contiguous int32 or int64 on the CPU. Everything else is `None` here and goes the
//! ordinary way (`buffers`), which also says what is wrong with it.
//!
//! Why it is sound. A [`Seen`] holds nothing; it is true for as long as this thread keeps the interpreter and runs no
//! Python, since then nobody can resize, free or re-assign what was looked at (the module asks for the GIL). torch does
//! let go of the interpreter inside its operators: a thread in the middle of one that replaces the storage of this very
//! tensor (`resize_`, `set_`) races with us, as it does with every other operator on that tensor, and as it would with
//! the tensor's numpy view. Values that others write meanwhile are read as they come; they are copied before use.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr::NonNull;

use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyList, PyString, PyTuple, PyType};

/// `numpy.ndarray`, once an array was seen whose layout and buffer agree.
static ARRAY: PyOnceLock<Option<Py<PyType>>> = PyOnceLock::new();
/// `torch.Tensor` and its function that fills a [`DlTensor`].
static TENSOR: PyOnceLock<Option<(Py<PyType>, Export)>> = PyOnceLock::new();

/// The start of numpy's `PyArrayObject_fields`.
#[repr(C)]
struct ArrayObject {
    head: ffi::PyObject,
    data: *mut c_void,
    num_dims: c_int,
    shape: *const isize,
    strides: *const isize,
    base: *mut ffi::PyObject,
    dtype: *const ArrayDtype,
    flags: c_int,
}

/// The start of numpy's `PyArray_Descr`.
#[repr(C)]
struct ArrayDtype {
    head: ffi::PyObject,
    scalar: *mut ffi::PyTypeObject,
    kind: c_char,
    letter: c_char,
    byte_order: c_char,
    flags: c_char,
    number: c_int,
}

const C_CONTIGUOUS: c_int = 0x1;
const ALIGNED: c_int = 0x100;
const WRITEABLE: c_int = 0x400;
const WARN_ON_WRITE: c_int = 1 << 31;

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    num_dims: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const DL_CPU: i32 = 1;
const DL_INT: u8 = 0;

/// `DLPackExchangeAPI` of dlpack.h, version 1.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object: *const c_void,
    managed_tensor_to_py_object: *const c_void,
    dltensor_from_py_object: Option<Export>,
}

/// Fills the second from the first, which is of the class that the function came from. Nonzero: a Python error is set.
type Export = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// C-contiguous integers in the memory of an object, as it was when it was looked at.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    /// Aligned; dangling if there are none.
    start: NonNull<c_void>,
    len: usize,
    item_size: usize,
    num_dims: usize,
    /// Of the first dimension; 1 if there is none.
    num_rows: usize,
    is_writable: bool,
}

/// The integers of one dimension, for as long as nobody can take them away. Others may write them meanwhile.
#[derive(Clone, Copy)]
pub(crate) enum Integers<'a> {
    Narrow(&'a [Cell<i32>]),
    Wide(&'a [Cell<i64>]),
}

/// Lets `take` copy the integers of a one-dimensional array or tensor to `kept`; `None` if it can't be looked into.
/// `take` is no closure, so that it has no interpreter that it could let go of.
#[inline]
pub(crate) fn read<T, R>(
    value: &Bound<'_, PyAny>,
    kept: &mut T,
    take: fn(Integers<'_>, &mut T) -> R,
) -> Option<R> {
    let seen = look(value).filter(|seen| seen.num_dims == 1)?;
    // SAFETY: the memory holds `len` aligned, initialised integers of this size. It stays until `take` returns, as this
    // thread keeps the interpreter meanwhile; cells, as others may write to it.
    let integers = unsafe {
        match seen.item_size {
            4 => Integers::Narrow(std::slice::from_raw_parts(seen.start.as_ptr().cast(), seen.len)),
            _ => Integers::Wide(std::slice::from_raw_parts(seen.start.as_ptr().cast(), seen.len)),
        }
    };
    Some(take(integers, kept))
}

/// Where the integers of an array or a tensor lie now. May run Python for a class that was not met before.
#[inline]
pub(crate) fn look(value: &Bound<'_, PyAny>) -> Option<Seen> {
    let (py, class) = (value.py(), value.get_type_ptr());
    if let Some(Some(array)) = ARRAY.get(py)
        && array.as_ptr().cast() == class
    {
        return look_into_array(value);
    }
    if let Some(Some((tensor, export))) = TENSOR.get(py)
        && tensor.as_ptr().cast() == class
    {
        return look_into_tensor(value, *export);
    }
    if value.is_exact_instance_of::<PyList>() || value.is_exact_instance_of::<PyTuple>() {
        return None;
    }
    learn(value).unwrap_or_default()
}

impl Seen {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Rows, if it has two dimensions.
    pub(crate) fn rows_of_two(&self) -> Option<usize> {
        (self.num_dims == 2).then_some(self.num_rows)
    }

    /// Whether values of type `T`, an integer, can be written to it.
    pub(crate) fn can_take<T: Element>(&self) -> bool {
        self.is_writable && self.item_size == size_of::<T>()
    }

    /// # Safety
    /// It [can take](Self::can_take) values of `T`; this thread has kept the interpreter and run no Python since the
    /// look, and does so while the slice is used; no other slice over this memory exists.
    pub(crate) unsafe fn slice_mut<'a, T: Element>(self) -> &'a mut [T] {
        // SAFETY: `len` aligned, initialised, writable values begin at `start`; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len) }
    }

    /// `shape` gives the size of each dimension.
    #[inline]
    fn new(
        data: *mut c_void,
        item_size: usize,
        mut shape: impl ExactSizeIterator<Item = usize>,
        is_writable: bool,
    ) -> Option<Self> {
        let num_dims = shape.len();
        let num_rows = shape.next().unwrap_or(1);
        let len = shape.try_fold(num_rows, usize::checked_mul)?;
        // What has no address although it has elements belongs to a transformation that torch traces.
        let start = if len == 0 { NonNull::<u64>::dangling().cast() } else { NonNull::new(data)? };
        let is_aligned = start.as_ptr().addr().is_multiple_of(item_size);
        is_aligned.then_some(Self { start, len, item_size, num_dims, num_rows, is_writable })
    }
}

/// `value` is exactly a `numpy.ndarray`.
#[inline]
fn look_into_array(value: &Bound<'_, PyAny>) -> Option<Seen> {
    // SAFETY: an exact array begins with these fields (checked against its buffer when the class was learned), and
    // always has a dtype. Nothing is kept beyond this call but the numbers.
    let (array, dtype) = unsafe {
        let array = &*value.as_ptr().cast::<ArrayObject>();
        (array, &*array.dtype)
    };
    let item_size = match dtype.number {
        5 => size_of::<c_int>(),
        7 => size_of::<c_long>(),
        9 => size_of::<i64>(),
        _ => return None,
    };
    let wanted = C_CONTIGUOUS | ALIGNED;
    if dtype.byte_order != b'=' as c_char || array.flags & (wanted | WARN_ON_WRITE) != wanted {
        return None;
    }
    let shape: &[isize] = match usize::try_from(array.num_dims).ok()? {
        0 => &[],
        // SAFETY: an array of `num_dims` dimensions has so many sizes.
        num_dims => unsafe { std::slice::from_raw_parts(array.shape, num_dims) },
    };
    let is_writable = array.flags & WRITEABLE != 0;
    Seen::new(array.data, item_size, shape.iter().map(|&size| size as usize), is_writable)
}

/// `value` is exactly a `torch.Tensor`, whose class `export` came from.
#[inline]
fn look_into_tensor(value: &Bound<'_, PyAny>, export: Export) -> Option<Seen> {
    let mut tensor = DlTensor {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        num_dims: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        byte_offset: 0,
    };
    // SAFETY: the function takes an object of this class and fills the tensor, or sets an error. It keeps neither.
    if unsafe { export(value.as_ptr().cast(), &raw mut tensor) } != 0 {
        drop(PyErr::take(value.py()));
        return None;
    }
    let is_plain = tensor.device_type == DL_CPU
        && (tensor.code, tensor.lanes, tensor.byte_offset) == (DL_INT, 1, 0)
        && matches!(tensor.bits, 32 | 64);
    let num_dims = usize::try_from(tensor.num_dims).ok()?;
    if !is_plain || (num_dims > 0 && (tensor.shape.is_null() || tensor.strides.is_null())) {
        return None;
    }
    let (shape, strides): (&[i64], &[i64]) = match num_dims {
        0 => (&[], &[]),
        // SAFETY: the tensor owns so many sizes and strides, and is not changed before we are done with them here.
        _ => unsafe {
            (
                std::slice::from_raw_parts(tensor.shape, num_dims),
                std::slice::from_raw_parts(tensor.strides, num_dims),
            )
        },
    };
    let mut behind = 1;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if size > 1 && stride != behind && !shape.contains(&0) {
            return None; // not C-contiguous
        }
        behind *= size;
    }
    let item_size = usize::from(tensor.bits / 8);
    Seen::new(tensor.data, item_size, shape.iter().map(|&size| size as usize), true)
}

/// Looks into an object whose class was not met before, if it is one of the two.
#[cold]
fn learn(value: &Bound<'_, PyAny>) -> PyResult<Option<Seen>> {
    let (py, class) = (value.py(), value.get_type());
    if ARRAY.get(py).is_some() && TENSOR.get(py).is_some() {
        return Ok(None);
    }
    // Who passes an array or a tensor has imported its package.
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>()?;
    let is_attribute = |package: &Bound<'_, PyString>, name: &Bound<'_, PyString>| -> PyResult<bool> {
        let Some(package) = modules.get_item(package)? else { return Ok(false) };
        Ok(package.getattr(name)?.is(&class))
    };
    if ARRAY.get(py).is_none() && is_attribute(intern!(py, "numpy"), intern!(py, "ndarray"))? {
        // The object is trusted only after what its layout says was found in its buffer too.
        let Ok(buffer) = PyUntypedBuffer::get(value) else { return Ok(None) };
        let Some(seen) = look_into_array(value) else { return Ok(None) };
        let agrees = buffer.item_size() == seen.item_size
            && buffer.item_count() == seen.len
            && buffer.shape().len() == seen.num_dims
            && buffer.readonly() != seen.is_writable
            && (seen.len == 0 || buffer.buf_ptr() == seen.start.as_ptr());
        let _ = ARRAY.set(py, agrees.then(|| class.unbind()));
        return Ok(agrees.then_some(seen));
    }
    if TENSOR.get(py).is_none() && is_attribute(intern!(py, "torch"), intern!(py, "Tensor"))? {
        let export = export_of(&class);
        let _ = TENSOR.set(py, export.map(|export| (class.unbind(), export)));
        return Ok(export.and_then(|export| look_into_tensor(value, export)));
    }
    Ok(None)
}

/// The function of the class's `DLPack` table; `None` if it has none that we understand.
fn export_of(class: &Bound<'_, PyType>) -> Option<Export> {
    let capsule = class.getattr(intern!(class.py(), "__dlpack_c_exchange_api__")).ok()?;
    let table = capsule.cast::<PyCapsule>().ok()?.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
    // SAFETY: a capsule of this name holds the address of such a table, which lives as long as the process; its first
    // two numbers are the version, and the rest is as declared here in every version of major number 1.
    let table = unsafe { table.cast::<ExchangeApi>().as_ref() };
    if table.major == 1 { table.dltensor_from_py_object } else { None }
}

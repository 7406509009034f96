//! `kvpager._core`: the Python binding of `kvpager-core`.
//!
//! A thin layer: each method converts its arguments, calls the core under the manager's one lock, and maps the error to
//! its class in `kvpager.errors`. It decides nothing about blocks.
//!
//! * `arguments` reads single integers, `arrays` many, `prompt` a prompt and its keys; `buffers` is the memory of
//!   numpy arrays, CPU tensors and the like, to read from or to write an answer to; `tensors` makes new ones;
//! * `failure` maps every error of the core to its Python class, and a panic to one too;
//! * `manager` is the class and its lock, `sequences`, `batches`, `prefix` and `figures` are its methods; `answers` are
//!   the frozen objects that some of them return;
//! * `batch` is the class of a batch that writes into the caller's buffers, `lent` those buffers.

mod answers;
mod arguments;
mod arrays;
mod batch;
mod batches;
mod buffers;
mod failure;
mod figures;
mod lent;
mod manager;
mod prefix;
mod prompt;
mod sequences;
mod tensors;

/// The Rust half of kvpager: integers only. `kvpager.KVBlockManager` builds on it.
#[pyo3::pymodule(name = "_core", gil_used = true)] // `buffers::Out::write` counts on it
mod module {
    #[pymodule_export]
    use crate::answers::{BatchStep, BlockInfo, PoolStats};
    #[pymodule_export]
    use crate::batch::DecodeBatch;
    #[pymodule_export]
    use crate::manager::KVBlockManager;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

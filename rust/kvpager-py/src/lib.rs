//! `kvpager._core`: the Python binding of `kvpager-core`.
//!
//! A thin layer: each method converts its arguments, calls the core under the manager's one lock, and maps the error to
//! its class in `kvpager.errors`. It decides nothing about blocks.
//!
//! * `arguments` reads single integers, `arrays` many (numpy, `array`, CPU tensors, lists); `out` is where an answer goes;
//!   both look into arrays and tensors in place (`memory`) and fall back to the buffer protocol (`buffers`);
//! * `failure` maps every error of the core to its Python class, and a panic to one too;
//! * `manager` is the class and its lock, `sequences`, `batches`, `exports`, `prefix` and `figures` its methods, `prompt`
//!   what they read of a prompt; `stats` and `info` are frozen answers;
//! * `batch` is the class of a batch that writes into the caller's buffers, `lent` those buffers.

mod arguments;
mod arrays;
mod batch;
mod batches;
mod buffers;
mod exports;
mod failure;
mod figures;
mod info;
mod lent;
mod manager;
mod memory;
mod out;
mod prefix;
mod prompt;
mod sequences;
mod stats;

/// The Rust half of kvpager: integers only. `kvpager.KVBlockManager` builds on it.
#[pyo3::pymodule(name = "_core", gil_used = true)] // `memory` counts on it
mod module {
    #[pymodule_export]
    use crate::batch::{BatchStep, DecodeBatch};
    #[pymodule_export]
    use crate::info::BlockInfo;
    #[pymodule_export]
    use crate::manager::KVBlockManager;
    #[pymodule_export]
    use crate::stats::PoolStats;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

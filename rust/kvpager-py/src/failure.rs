//! From Rust failures to the classes of `kvpager.errors`, which word each message once, in Python.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvpager_core::Error;
use pyo3::PyErr;

mod classes {
    //! Looked up in Python on first use.
    pyo3::import_exception!(kvpager.errors, ArgumentError);
    pyo3::import_exception!(kvpager.errors, ConfigError);
    pyo3::import_exception!(kvpager.errors, DuplicateSequenceError);
    pyo3::import_exception!(kvpager.errors, OutOfBlocksError);
    pyo3::import_exception!(kvpager.errors, SequenceTooLongError);
    pyo3::import_exception!(kvpager.errors, SlotError);
    pyo3::import_exception!(kvpager.errors, StateError);
    pyo3::import_exception!(kvpager.errors, UnknownSequenceError);
}

/// Why a call into the core gave no answer.
pub(crate) enum Failure {
    /// The core refused; the state is as before.
    Refused(Error),
    /// The core panicked: a bug of ours. The manager's lock is poisoned from here on.
    Panicked(String),
    /// An earlier call panicked.
    Poisoned,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<Failure> for PyErr {
    #[cold]
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(error) => refused(error),
            Failure::Panicked(message) => classes::StateError::new_err(format!(
                "internal error, please report it: {message}; this manager can't be used any more"
            )),
            Failure::Poisoned => classes::StateError::new_err(
                "an internal error in an earlier call left this manager unusable",
            ),
        }
    }
}

/// Every error of the core has its class. No catch-all arm: a new variant does not compile until it has one too.
fn refused(error: Error) -> PyErr {
    match error {
        Error::Config { reason } => classes::ConfigError::new_err(reason),
        Error::Argument { argument, wanted, got } => argument_error(argument, &wanted, got),
        Error::OutOfBlocks { needed, free, fenced, total, row, watermark } => {
            classes::OutOfBlocksError::new_err((needed, free, fenced, total, row, watermark))
        }
        Error::UnknownSequence { sequence_id } => classes::UnknownSequenceError::new_err((sequence_id,)),
        Error::DuplicateSequence { sequence_id } => classes::DuplicateSequenceError::new_err((sequence_id,)),
        Error::SequenceTooLong { reason } => classes::SequenceTooLongError::new_err(reason),
        Error::State { reason } => classes::StateError::new_err(reason),
        Error::Slot { reason } => classes::SlotError::new_err(reason),
    }
}

/// An `ArgumentError` found while converting.
#[cold]
pub(crate) fn argument_error(argument: &str, wanted: &str, got: String) -> PyErr {
    classes::ArgumentError::new_err((argument.to_owned(), wanted.to_owned(), got))
}

/// A `ConfigError` found while converting.
#[cold]
pub(crate) fn config_error(reason: String) -> PyErr {
    classes::ConfigError::new_err(reason)
}

/// A `SlotError` found while converting.
#[cold]
pub(crate) fn slot_error(reason: String) -> PyErr {
    classes::SlotError::new_err(reason)
}

/// Runs a call into the core so that a panic becomes a [`Failure`] and never unwinds into the interpreter. `body` takes
/// the lock itself: unwinding through the guard is what poisons it.
#[inline]
pub(crate) fn guarded<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // Nothing of the state is looked at again after a panic: the poisoned lock sees to that.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Failure::Panicked(describe(&*payload))))
}

#[cold]
fn describe(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned())
}

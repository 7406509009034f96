//! The methods of the class about cached prefixes: admission, pins, epochs.

use kvpager_core::Error;
use pyo3::prelude::*;

use crate::arguments::{COUNT, read_natural, read_sequence_id};
use crate::arrays::Arrays;
use crate::failure::argument_error;
use crate::manager::KVBlockManager;
use crate::out::Out;
use crate::prompt::Keys;

#[pymethods]
impl KVBlockManager {
    /// Make a sequence from a prompt: attach the longest cached prefix, append the next `num_new_tokens` tokens (default:
    /// all that remain) and write their slots to the front of `out`, a writable int64 buffer with room for them.
    /// Returns (computed tokens, slots written). One step or not at all. O(tokens + slots).
    #[pyo3(signature = (
        sequence_id, token_ids, out, num_new_tokens = None, salt = None, adapter = None, items = None,
        resumed = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python method")]
    fn admit_into(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        num_new_tokens: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
        resumed: bool,
    ) -> PyResult<(u64, u64)> {
        let id = read_sequence_id(sequence_id)?;
        self.with_arrays(|arrays| {
            arrays.read_token_ids(token_ids)?;
            let num_new_tokens =
                num_new_tokens.map(|n| read_natural(n, "num_new_tokens", COUNT)).transpose()?;
            let Arrays { token_ids, slots, .. } = arrays;
            let keys = Keys::read(salt, adapter, items, token_ids.len())?;
            let (items, work) = (keys.items(), token_ids.len() as u64);
            let prompt = keys.prompt(token_ids, &items);
            let most = work.min(num_new_tokens.unwrap_or(work));
            let target = match Out::open(out, || wanted_of_out(most)) {
                Ok(target) => target,
                Err(about_out) => {
                    // What is wrong with the prompt itself is said first.
                    self.call(py, work, |manager| {
                        manager.settle_admission(id, &prompt, num_new_tokens).map(drop)
                    })?;
                    return Err(about_out);
                }
            };
            let admitted = self.call_into(py, work, target, |manager, out| {
                // How many slots there are is known only after matching: looked at first where `out` may be too small.
                if (out.len() as u64) < most {
                    let planned = manager.settle_admission(id, &prompt, num_new_tokens)?;
                    if (out.len() as u64) < planned.num_slots {
                        return Ok(Err(planned.num_slots));
                    }
                }
                slots.clear();
                let admission = manager.admit(id, &prompt, num_new_tokens, resumed, slots)?;
                out[..slots.len()].copy_from_slice(slots);
                Ok(Ok(admission))
            })?;
            match admitted {
                Ok(admission) => Ok((admission.num_computed_tokens, admission.num_slots)),
                Err(num_slots) => {
                    let wanted = wanted_of_out(num_slots);
                    Err(argument_error("out", &wanted, Out::<i64>::open(out, || wanted.clone())?.describe()))
                }
            }
        })
    }

    /// Whether `admit` would succeed now; False only for want of blocks. Changes nothing. O(tokens).
    #[pyo3(signature = (
        sequence_id, token_ids, *, num_new_tokens = None, salt = None, adapter = None, items = None, resumed = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python method")]
    fn can_admit(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        num_new_tokens: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
        resumed: bool,
    ) -> PyResult<bool> {
        let _ = resumed; // the same arguments as `admit`; it makes no difference here
        let id = read_sequence_id(sequence_id)?;
        self.with_arrays(|arrays| {
            arrays.read_token_ids(token_ids)?;
            let num_new_tokens =
                num_new_tokens.map(|n| read_natural(n, "num_new_tokens", COUNT)).transpose()?;
            let token_ids = &arrays.token_ids;
            let keys = Keys::read(salt, adapter, items, token_ids.len())?;
            let items = keys.items();
            let prompt = keys.prompt(token_ids, &items);
            self.call(py, token_ids.len() as u64, |manager| manager.can_admit(id, &prompt, num_new_tokens))
        })
    }

    /// Leading tokens of a prompt that `admit` would find computed. Changes nothing, counts nothing. O(tokens).
    #[pyo3(signature = (token_ids, *, salt = None, adapter = None, items = None))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        self.with_arrays(|arrays| {
            arrays.read_token_ids(token_ids)?;
            let token_ids = &arrays.token_ids;
            let keys = Keys::read(salt, adapter, items, token_ids.len())?;
            let items = keys.items();
            let prompt = keys.prompt(token_ids, &items);
            self.call(py, token_ids.len() as u64, |manager| manager.match_prefix(&prompt))
        })
    }

    /// Hold the cached full blocks of a prompt until `unpin`; the id of the pin. O(tokens).
    #[pyo3(signature = (token_ids, *, salt = None, adapter = None, items = None))]
    fn pin_prefix(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        self.with_arrays(|arrays| {
            arrays.read_token_ids(token_ids)?;
            let token_ids = &arrays.token_ids;
            let keys = Keys::read(salt, adapter, items, token_ids.len())?;
            let items = keys.items();
            let prompt = keys.prompt(token_ids, &items);
            self.call(py, token_ids.len() as u64, |manager| manager.pin_prefix(&prompt))
        })
    }

    /// Let go of a pin's blocks, last first. O(blocks).
    fn unpin(&self, py: Python<'_>, pin: &Bound<'_, PyAny>) -> PyResult<()> {
        let pin = read_natural(pin, "pin", "the id of a pin that is held")?;
        self.call(py, 0, |manager| manager.unpin(pin))
    }

    /// Close the current epoch and return its number. O(1).
    fn advance_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, 0, kvpager_core::BlockManager::advance_epoch)
    }

    /// All work up to `epoch` is done: what was freed in it may be handed out. O(blocks freed in it).
    fn retire(&self, py: Python<'_>, epoch: &Bound<'_, PyAny>) -> PyResult<()> {
        let integer = read_natural(epoch, "epoch", "a closed epoch");
        let epoch = match integer {
            Ok(epoch) => epoch,
            // Below 0 or above any: as the core words it, with what came.
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => return Err(error),
            Err(_) => {
                let came = crate::arguments::text(epoch);
                return self.call(py, 0, move |manager| match manager.retire(u64::MAX) {
                    Err(Error::Argument { argument, wanted, .. }) => {
                        Err(Error::Argument { argument, wanted, got: came })
                    }
                    other => other,
                });
            }
        };
        self.call(py, u64::from(self.config.num_blocks()), |manager| manager.retire(epoch))
    }

    /// Forget every cached prefix; sequences that have tokens by now index nothing more. O(blocks).
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        let work = u64::from(self.config.num_blocks());
        self.call(py, work, |manager| {
            manager.reset_prefix_cache();
            Ok(())
        })
    }
}

fn wanted_of_out(num_slots: u64) -> String {
    format!("a writable, contiguous int64 buffer of at least {num_slots} elements on the CPU")
}

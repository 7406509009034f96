//! The methods of the class about cached prefixes: admission, pins, epochs.

use kvpager_core::{AdmitOptions, Error, SequenceId};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PySlice, PyTuple, PyType};

use crate::arguments::{COUNT, read_flag, read_natural, read_sequence_id};
use crate::arrays::Arrays;
use crate::failure::argument_error;
use crate::manager::KVBlockManager;
use crate::out::{Out, new_tensor};
use crate::prompt::Keys;

#[pymethods]
impl KVBlockManager {
    /// Create a sequence from its prompt: attach the longest cached prefix, reserve the slots to compute next.
    ///
    /// One step or not at all. At least the last prompt token is left to compute. The ids of the whole prompt are kept,
    /// so the later chunks of a long prompt need only counts. `can_admit` answers for the same arguments.
    ///
    /// Args:
    ///     `sequence_id`: a new id, 0 to 2^63 - 1.
    ///     `token_ids`: `token_ids [P]`, ids 0 to 2^31 - 1: an int64 or int32 tensor (CPU), array or other buffer, or an
    ///         iterable of ints.
    ///     `num_new_tokens`: slots to reserve, at most; None: for all tokens that remain to be computed.
    ///     `reserve_blocks`: blocks that must be left to hand out afterwards. Of this and `watermark_blocks` the larger
    ///         one is kept back; unlike the watermark, it is kept back while no block is live, too.
    ///     salt: keeps prefixes apart that must not be shared, those of two tenants for example. None is not `""`.
    ///     adapter: name of the adapter that computes; its K/V are found under this name only.
    ///     items: media in the prompt, (start, stop, key), sorted and disjoint; a block is found only with the items that
    ///         touch it.
    ///     resumed: the request was here before and comes back: what it finds is not counted as hit.
    ///     out: writable C-contiguous int64 buffer with room for the slots (P are always enough); they are written to
    ///         its front and the rest is left as it was. None: a new tensor of just the slots.
    ///
    /// Returns:
    ///     `Admission(num_computed_tokens, slots)`: `slots [T] int64`, or `out` itself if it was given. T is
    ///     P - `num_computed_tokens`, or `num_new_tokens` if that is less.
    ///
    /// Raises:
    ///     `DuplicateSequenceError`: the id exists.
    ///     `SequenceTooLongError`: the prompt needs more than the pool or `max_sequence_length` ever has.
    ///     `OutOfBlocksError`: not enough blocks now; `needed` includes the `watermark`.
    ///     `ArgumentError`: a bad id, token id, count, item or `out`.
    ///
    /// Cost: O(P + T).
    #[pyo3(signature = (
        sequence_id, token_ids, *, num_new_tokens = None, reserve_blocks = None, salt = None, adapter = None,
        items = None, resumed = false, out = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python method")]
    fn admit<'py>(
        &self,
        py: Python<'py>,
        sequence_id: &Bound<'py, PyAny>,
        token_ids: &Bound<'py, PyAny>,
        num_new_tokens: Option<&Bound<'py, PyAny>>,
        reserve_blocks: Option<&Bound<'py, PyAny>>,
        salt: Option<&Bound<'py, PyAny>>,
        adapter: Option<&Bound<'py, PyAny>>,
        items: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = read_resumed)] resumed: bool,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let id = read_sequence_id(sequence_id)?;
        self.with_arrays(|arrays| {
            arrays.read_token_ids(token_ids)?;
            let options = read_options(num_new_tokens, reserve_blocks, resumed)?;
            let keys = Keys::read(salt, adapter, items, arrays.token_ids.len())?;
            let Some(out) = out else {
                // What is refused as too long gets no memory.
                let room = options.num_new_tokens.unwrap_or(u64::MAX).min(arrays.token_ids.len() as u64);
                let fits = room <= u64::from(self.config.num_blocks()) * self.config.block_size();
                let slots = new_tensor(py, &[if fits { room } else { 0 }], "int64", None)?;
                let (num_computed, num_slots) = self.admit_into(py, id, arrays, &keys, &options, &slots)?;
                return answer(num_computed, slots.get_item(PySlice::new(py, 0, num_slots as isize, 1))?);
            };
            let (num_computed, _) = self.admit_into(py, id, arrays, &keys, &options, out)?;
            answer(num_computed, out.clone())
        })
    }

    /// Whether `admit` would succeed now; False only for want of blocks. Changes nothing. O(tokens).
    #[pyo3(signature = (
        sequence_id, token_ids, *, num_new_tokens = None, reserve_blocks = None, salt = None, adapter = None,
        items = None, resumed = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python method")]
    fn can_admit(
        &self,
        py: Python<'_>,
        sequence_id: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        num_new_tokens: Option<&Bound<'_, PyAny>>,
        reserve_blocks: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = read_resumed)] resumed: bool,
    ) -> PyResult<bool> {
        let id = read_sequence_id(sequence_id)?;
        self.with_arrays(|arrays| {
            arrays.read_token_ids(token_ids)?;
            let options = read_options(num_new_tokens, reserve_blocks, resumed)?;
            let token_ids = &arrays.token_ids;
            let keys = Keys::read(salt, adapter, items, token_ids.len())?;
            let items = keys.items();
            let prompt = keys.prompt(token_ids, &items);
            self.call(py, token_ids.len() as u64, |manager| manager.can_admit(id, &prompt, &options))
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

impl KVBlockManager {
    /// Admits the prompt that was read to `arrays`, and writes its slots to the front of `out`: (computed tokens, slots).
    fn admit_into(
        &self,
        py: Python<'_>,
        id: SequenceId,
        arrays: &mut Arrays,
        keys: &Keys,
        options: &AdmitOptions,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, u64)> {
        let Arrays { token_ids, slots, .. } = arrays;
        let (items, work) = (keys.items(), token_ids.len() as u64);
        let prompt = keys.prompt(token_ids, &items);
        let most = work.min(options.num_new_tokens.unwrap_or(work));
        let target = match Out::open(out, || wanted_of_out(most)) {
            Ok(target) => target,
            Err(about_out) => {
                // What is wrong with the prompt itself is said first.
                self.call(py, work, |manager| manager.settle_admission(id, &prompt, options).map(drop))?;
                return Err(about_out);
            }
        };
        let admitted = self.call_into(py, work, target, |manager, out| {
            // How many slots there are is known only after matching: looked at first where `out` may be too small.
            if (out.len() as u64) < most {
                let planned = manager.settle_admission(id, &prompt, options)?;
                if (out.len() as u64) < planned.num_slots {
                    return Ok(Err(planned.num_slots));
                }
            }
            slots.clear();
            let admission = manager.admit(id, &prompt, options, slots)?;
            out[..slots.len()].copy_from_slice(slots);
            Ok(Ok((admission.num_computed_tokens, admission.num_slots)))
        })?;
        admitted.or_else(|num_slots| {
            let wanted = wanted_of_out(num_slots);
            Err(argument_error("out", &wanted, Out::<i64>::open(out, || wanted.clone())?.describe()))
        })
    }
}

/// An `Admission`, a named tuple: made as a tuple, without the Python function that its own constructor is.
fn answer(num_computed: u64, slots: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static NEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = slots.py();
    let class = CLASS.import(py, "kvpager.block_manager", "Admission")?;
    let new = NEW.get_or_try_init(py, || {
        py.get_type::<PyTuple>().getattr(intern!(py, "__new__")).map(Bound::unbind)
    })?;
    new.bind(py).call1((class, (num_computed, slots)))
}

fn read_options(
    num_new_tokens: Option<&Bound<'_, PyAny>>,
    reserve_blocks: Option<&Bound<'_, PyAny>>,
    resumed: bool,
) -> PyResult<AdmitOptions> {
    let num_new_tokens = num_new_tokens.map(|n| read_natural(n, "num_new_tokens", COUNT)).transpose()?;
    let reserve_blocks = reserve_blocks.map(|n| read_natural(n, "reserve_blocks", COUNT)).transpose()?;
    Ok(AdmitOptions { num_new_tokens, reserve_blocks: reserve_blocks.unwrap_or(0), resumed })
}

fn read_resumed(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    read_flag(value, "resumed")
}

fn wanted_of_out(num_slots: u64) -> String {
    format!("a writable, contiguous int64 buffer of at least {num_slots} elements on the CPU")
}

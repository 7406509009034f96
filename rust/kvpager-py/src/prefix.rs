//! The methods of the class about cached prefixes: admission, pins, epochs.

use kvpager_core::{AdmitOptions, BlockManager, Error};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PySlice, PyTuple, PyType};

use crate::arguments::{COUNT, natural, read_flag, read_natural, read_sequence_id, text};
use crate::buffers::Out;
use crate::manager::KVBlockManager;
use crate::prompt::OwnedPrompt;
use crate::tensors::new_tensor;

#[pymethods]
impl KVBlockManager {
    /// Create a sequence from its prompt: attach the longest cached prefix, reserve the slots to compute next.
    ///
    /// One step or not at all. At least the last prompt token is left to compute. The ids of the whole prompt are kept,
    /// so the later chunks of a long prompt need only counts. `can_admit` answers for the same arguments.
    ///
    /// Args: `sequence_id`: a new id, 0 to 2^63 - 1. `token_ids`: `token_ids [P]`, ids 0 to 2^31 - 1: an int64 or int32
    /// tensor (CPU), array or other buffer, or an iterable of ints. `num_new_tokens`: slots to reserve, at most; None:
    /// for all tokens that remain to be computed. `reserve_blocks`: blocks that must be left to hand out afterwards. Of
    /// this and `watermark_blocks` the larger one is kept back; unlike the watermark, it is kept back while no block is
    /// live, too. salt: keeps prefixes apart that must not be shared, those of two tenants for example. None is not
    /// `""`. adapter: name of the adapter that computes; its K/V are found under this name only. items: media in the
    /// prompt, (start, stop, key), sorted and disjoint; a block is found only with the items that touch it. resumed:
    /// the request was here before and comes back: what it finds is not counted as hit. out: writable C-contiguous
    /// int64 buffer with room for the slots (P are always enough); they are written to its front and the rest is left
    /// as it was. None: a new tensor of just the slots.
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
        let prompt = OwnedPrompt::read(token_ids, salt, adapter, items)?;
        let options = read_options(num_new_tokens, reserve_blocks, resumed)?;
        let most = prompt.len().min(options.num_new_tokens.unwrap_or(u64::MAX));
        // A prompt that is refused as too long gets no memory.
        let room = if most <= self.num_slots() { most } else { 0 };
        let memory = out.map_or_else(|| new_tensor(py, &[room], "int64", None), |out| Ok(out.clone()))?;
        let target = Out::open("out", &memory, || wanted_of_out(most), |_| true)?;
        let (is_given, mut slots) = (out.is_some(), Vec::new());
        let admitted = self.call(py, prompt.len(), |manager| {
            prompt.lend(|prompt| {
                // How many slots there are is known only after matching: looked at first if `out` may be too small.
                if (target.len() as u64) < most && is_given {
                    let rest = prompt.token_ids.len() as u64 - manager.match_prefix(prompt)?;
                    if (target.len() as u64) < rest.min(most) {
                        return Err(target.too_small(wanted_of_out(rest.min(most))));
                    }
                }
                manager.admit(id, prompt, &options, &mut slots)
            })
        })?;
        target.write(py, &slots);
        let all = PySlice::new(py, 0, slots.len() as isize, 1);
        let memory = if is_given { memory } else { memory.get_item(all)? };
        answer(admitted.num_computed_tokens, memory)
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
        let prompt = OwnedPrompt::read(token_ids, salt, adapter, items)?;
        let options = read_options(num_new_tokens, reserve_blocks, resumed)?;
        self.call(py, prompt.len(), |manager| prompt.lend(|prompt| manager.can_admit(id, prompt, &options)))
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
        let prompt = OwnedPrompt::read(token_ids, salt, adapter, items)?;
        self.call(py, prompt.len(), |manager| prompt.lend(|prompt| manager.match_prefix(prompt)))
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
        let prompt = OwnedPrompt::read(token_ids, salt, adapter, items)?;
        self.call(py, prompt.len(), |manager| prompt.lend(|prompt| manager.pin_prefix(prompt)))
    }

    /// Let go of a pin's blocks, last first. O(blocks).
    fn unpin(&self, py: Python<'_>, pin: &Bound<'_, PyAny>) -> PyResult<()> {
        let pin = read_natural(pin, "pin", "the id of a pin that is held")?;
        self.call(py, 0, |manager| manager.unpin(pin))
    }

    /// Close the current epoch and return its number. O(1).
    fn advance_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, 0, BlockManager::advance_epoch)
    }

    /// All work up to `epoch` is done: what was freed in it may be handed out. O(blocks freed in it).
    fn retire(&self, py: Python<'_>, epoch: &Bound<'_, PyAny>) -> PyResult<()> {
        // An integer that can be no epoch is refused as the core words it, with the value that came.
        let (number, came) = (natural(epoch, "epoch")?.unwrap_or(u64::MAX), text(epoch));
        self.call(py, self.all_blocks(), |manager| {
            manager.retire(number).map_err(|error| match error {
                Error::Argument { argument, wanted, .. } => Error::Argument { argument, wanted, got: came },
                other => other,
            })
        })
    }

    /// Forget every cached prefix; sequences that have tokens by now index nothing more. O(blocks).
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, self.all_blocks(), |manager| {
            manager.reset_prefix_cache();
            Ok(())
        })
    }
}

/// An `Admission`, a named tuple: made as a tuple, without the Python function that its own constructor is.
fn answer(num_computed: u64, slots: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static NEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = slots.py();
    let class = CLASS.import(py, "kvpager.manager", "Admission")?;
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

//! A prompt from Python: its token ids, and the keys that tell equal ones apart (salt, adapter, media items).

use kvpager_core::{Item, Prompt, TokenId};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyString, PyTuple};

use crate::arguments::{integer, wrong_kind};
use crate::arrays::read_token_ids;
use crate::failure::argument_error;

/// A prompt, owned while the core reads it.
pub(crate) struct OwnedPrompt {
    token_ids: Vec<TokenId>,
    salt: Option<PyBackedStr>,
    adapter: Option<PyBackedStr>,
    items: Vec<(u64, u64, PyBackedStr)>,
}

impl OwnedPrompt {
    /// Reads and checks it; `items` are (start, stop, key), sorted, disjoint and within the prompt's tokens.
    pub(crate) fn read(
        token_ids: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let token_ids = read_token_ids(token_ids)?;
        let num_tokens = token_ids.len();
        let text = |value: Option<&Bound<'_, PyAny>>, argument: &str| {
            value.map(|value| read_text(value, argument, "a str or None")).transpose()
        };
        let (salt, adapter) = (text(salt, "salt")?, text(adapter, "adapter")?);
        let mut read = Vec::new();
        let mut behind = 0;
        // Mostly there are none: the empty tuple needs no iterator.
        let items = items.filter(|items| !items.cast_exact::<PyTuple>().is_ok_and(PyTupleMethods::is_empty));
        for item in items.map(PyAnyMethods::try_iter).transpose()?.into_iter().flatten() {
            let [start, stop, key] = read_triple(&item?)?;
            let (first, last) = (integer::<i64>(&start, "items")?, integer::<i64>(&stop, "items")?);
            let key = read_text(&key, "items", "a str as key")?;
            let within = first
                .zip(last)
                .filter(|&(first, last)| behind <= first && first < last && last as u64 <= num_tokens as u64);
            let Some((first, last)) = within else {
                let wanted = format!("sorted, disjoint (start, stop, key) within the {num_tokens} tokens");
                let came = format!("{} to {}", start.str()?, stop.str()?);
                return Err(argument_error("items", &wanted, came));
            };
            behind = last;
            read.push((first as u64, last as u64, key));
        }
        Ok(Self { token_ids, salt, adapter, items: read })
    }

    /// Tokens.
    pub(crate) fn len(&self) -> u64 {
        self.token_ids.len() as u64
    }

    /// Shows it to `body` as the core takes it.
    #[inline]
    pub(crate) fn lend<T>(&self, body: impl FnOnce(&Prompt<'_>) -> T) -> T {
        let Self { token_ids, salt, adapter, items } = self;
        let items: Vec<_> = items.iter().map(|&(start, stop, ref key)| Item { start, stop, key }).collect();
        body(&Prompt { token_ids, salt: salt.as_deref(), adapter: adapter.as_deref(), items: &items })
    }
}

fn read_triple<'py>(item: &Bound<'py, PyAny>) -> PyResult<[Bound<'py, PyAny>; 3]> {
    let refused = || wrong_kind(item, "items", "(start, stop, key)");
    let Ok(fields) = item.try_iter() else { return Err(refused()) };
    let fields = fields.take(4).collect::<PyResult<Vec<_>>>()?;
    <[Bound<'py, PyAny>; 3]>::try_from(fields).map_err(|_| refused())
}

fn read_text(value: &Bound<'_, PyAny>, argument: &str, wanted: &str) -> PyResult<PyBackedStr> {
    if let Ok(text) = value.cast::<PyString>() {
        return PyBackedStr::try_from(text.clone());
    }
    Err(wrong_kind(value, argument, wanted))
}

//! What tells equal tokens apart (salt, adapter, media items), from Python to the core's [`Prompt`].

use kvpager_core::{Item, Prompt, TokenId};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyString, PyTuple};

use crate::arguments::{read_signed, wrong_kind};
use crate::failure::argument_error;

/// The strings of a prompt, owned while the core reads them.
pub(crate) struct Keys {
    salt: Option<PyBackedStr>,
    adapter: Option<PyBackedStr>,
    items: Vec<(u64, u64, PyBackedStr)>,
}

impl Keys {
    /// Reads and checks them; `items` are (start, stop, key), sorted, disjoint and within the prompt's tokens.
    pub(crate) fn read(
        salt: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        items: Option<&Bound<'_, PyAny>>,
        num_tokens: usize,
    ) -> PyResult<Self> {
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
            let (first, last) = (read_signed(&start, "items")?, read_signed(&stop, "items")?);
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
        Ok(Self { salt, adapter, items: read })
    }

    /// The items as the core takes them.
    pub(crate) fn items(&self) -> Vec<Item<'_>> {
        self.items.iter().map(|&(start, stop, ref key)| Item { start, stop, key }).collect()
    }

    pub(crate) fn prompt<'a>(&'a self, token_ids: &'a [TokenId], items: &'a [Item<'a>]) -> Prompt<'a> {
        Prompt { token_ids, salt: self.salt.as_deref(), adapter: self.adapter.as_deref(), items }
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

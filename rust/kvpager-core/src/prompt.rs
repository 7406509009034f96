//! A prompt as it comes in: its token ids, what makes equal tokens different content, and the checks of both.
//!
//! Costs: O(tokens) to check.

use crate::config::MAX_TOKEN_ID;
use crate::error::{Error, Result};
use crate::ids::TokenId;

/// A media item of a prompt: the positions whose tokens stand for it, and what tells it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// First position.
    pub start: u64,
    /// Position behind the last.
    pub stop: u64,
    /// Its name, mostly a digest of its content.
    pub key: &'a str,
}

/// A prompt, and what makes the same tokens different content. `None` is not `""`.
///
/// ```
/// use kvpager_core::{Item, Prompt};
///
/// let prompt = Prompt { adapter: Some("french"), ..Prompt::new(&[5, 6, 7]) };
/// assert_eq!(prompt.items, []);
/// let items = [Item { start: 0, stop: 2, key: "sha256 of an image" }];
/// assert_eq!(Prompt { items: &items, ..prompt }.items.len(), 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// Token ids, each 0 to 2³¹ − 1.
    pub token_ids: &'a [TokenId],
    /// A secret or tenant whose content is shared with nobody else's.
    pub salt: Option<&'a str>,
    /// The adapter of the model's weights, if any.
    pub adapter: Option<&'a str>,
    /// Media items, sorted and disjoint.
    pub items: &'a [Item<'a>],
}

impl<'a> Prompt<'a> {
    /// Plain tokens. O(1).
    ///
    /// ```
    /// # use kvpager_core::Prompt;
    /// assert_eq!(Prompt::new(&[1, 2]).salt, None);
    /// ```
    #[must_use]
    pub fn new(token_ids: &'a [TokenId]) -> Self {
        Self { token_ids, salt: None, adapter: None, items: &[] }
    }
}

/// Media items are sorted, disjoint and lie within the prompt.
pub(crate) fn check_items(prompt: &Prompt<'_>) -> Result<()> {
    let num_tokens = prompt.token_ids.len() as u64;
    let mut behind = 0;
    for item in prompt.items {
        if item.start < behind || item.start >= item.stop || item.stop > num_tokens {
            let wanted = format!("sorted, disjoint (start, stop, key) within the {num_tokens} tokens");
            return Err(Error::argument("items", wanted, format!("{} to {}", item.start, item.stop)));
        }
        behind = item.stop;
    }
    Ok(())
}

/// Token ids are 0 to 2³¹ − 1.
pub(crate) fn check_token_ids(token_ids: &[TokenId], argument: &'static str) -> Result<()> {
    // The whole slice at once, so that the loop is a few vector instructions; in four places at once, so that the cache
    // misses of a prompt that is seen for the first time run side by side.
    let (quarters, rest) = token_ids.split_at(token_ids.len() & !3);
    let (left, right) = quarters.split_at(quarters.len() / 2);
    let ((first, second), (third, fourth)) = (left.split_at(left.len() / 2), right.split_at(right.len() / 2));
    let sides = first.iter().zip(second).zip(third.iter().zip(fourth));
    let bits = sides.fold(0, |bits, ((a, b), (c, d))| bits | a | b | c | d);
    if rest.iter().fold(bits, |bits, &id| bits | id) <= MAX_TOKEN_ID {
        return Ok(());
    }
    let bad = token_ids.iter().find(|&&id| id > MAX_TOKEN_ID).copied().unwrap_or_default();
    Err(Error::argument(argument, "a token id in 0..2^31-1", bad))
}

/// The part of sorted, disjoint `items` that overlaps the positions `start..stop`; `span` is the (start, stop) of one.
pub(crate) fn overlapping<T>(items: &[T], span: impl Fn(&T) -> (u64, u64), start: u64, stop: u64) -> &[T] {
    let first = items.partition_point(|item| span(item).1 <= start);
    let behind = first + items[first..].partition_point(|item| span(item).0 < stop);
    &items[first..behind]
}

/// Exactly `wanted` ids; `what` says for what.
pub(crate) fn check_num_ids(wanted: u64, what: &str, token_ids: &[TokenId]) -> Result<()> {
    if token_ids.len() as u64 == wanted {
        return Ok(());
    }
    Err(Error::argument("token_ids", format!("{wanted} ids, {what}"), format!("{} ids", token_ids.len())))
}

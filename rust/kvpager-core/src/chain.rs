//! What a sequence knows of its tokens, and how far the prefix index follows it.
//!
//! Ids are known or not: those of a prompt are kept whole from the start, others come with an append or a commit, and
//! a position whose id never came stays a gap. Blocks enter the index one after the other, `num_indexed` of them so far;
//! the first that can't ends it for good (until a truncation takes that block away).
//!
//! Costs: O(ids given) for everything, plus, where ids came out of order, O(ids behind the first gap).

use std::sync::Arc;

use crate::TokenId;
use crate::admission::Item;
use crate::keys::NO_KEY;

/// A released row keeps the memory of its token ids up to this many (256 KiB).
const KEPT_TOKEN_IDS: usize = 65_536;

/// In place of an id that is not known: none that a token can have.
const UNKNOWN: TokenId = TokenId::MAX;

/// A media item of a prompt, kept.
#[derive(Clone, Debug)]
pub(crate) struct KeptItem {
    pub(crate) start: u64,
    pub(crate) stop: u64,
    pub(crate) key: Arc<str>,
}

/// One row's. One cache line.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Chain {
    /// By position, [`UNKNOWN`] in a gap. Longer than the sequence while a prompt is not all there.
    ids: Vec<TokenId>,
    /// Leading ids without a gap.
    num_known: usize,
    /// Leading blocks that are nodes of the index, each the child of the one before.
    pub(crate) num_indexed: usize,
    /// Tokens whose keys and values are known to be written. Kept with the index only; without it, all are.
    pub(crate) computed: u64,
    /// Slot of the namespace.
    pub(crate) namespace: u32,
    /// Older than the last reset of the index: its content must not enter.
    pub(crate) is_stale: bool,
    /// Sorted and disjoint; none for most.
    #[expect(clippy::box_collection, reason = "one word in the row of every sequence that has none")]
    pub(crate) items: Option<Box<Vec<KeptItem>>>,
}

impl Chain {
    /// Ids at and past `length` that are kept: the rest of a prompt.
    #[inline]
    pub(crate) fn has_ids_past(&self, length: u64) -> bool {
        self.ids.len() as u64 > length
    }

    /// The first id among those for the positions from `position` on that differs from a kept one: its position, the
    /// kept one, and the id.
    pub(crate) fn first_conflict(
        &self,
        position: u64,
        token_ids: &[TokenId],
    ) -> Option<(u64, TokenId, TokenId)> {
        let kept = self.ids.get(usize::try_from(position).ok()?..)?;
        let at = kept.iter().zip(token_ids).position(|(kept, id)| *kept != UNKNOWN && kept != id)?;
        Some((position + at as u64, kept[at], token_ids[at]))
    }

    /// Keeps the id of the token at `position`, which was just appended.
    #[inline]
    pub(crate) fn append_one(&mut self, position: u64, token_id: TokenId) {
        if position as usize == self.ids.len() {
            if self.num_known == self.ids.len() {
                self.num_known += 1;
            }
            self.ids.push(token_id);
        } else {
            self.append(position, &[token_id]);
        }
    }

    /// Keeps the ids of tokens from `position` on, which agree with what is kept already.
    pub(crate) fn append(&mut self, position: u64, token_ids: &[TokenId]) {
        let position = position as usize;
        if position > self.ids.len() {
            self.ids.resize(position, UNKNOWN);
        }
        let num_kept = (self.ids.len() - position).min(token_ids.len());
        let is_whole = self.num_known == self.ids.len();
        self.ids.extend_from_slice(&token_ids[num_kept..]);
        if is_whole {
            self.num_known = self.ids.len();
        }
    }

    /// Takes the id of the one token between the computed ones and `n`, if that is all that is missing.
    #[inline]
    pub(crate) fn commit_next(&mut self, n: u64, token_id: TokenId) -> bool {
        let computed = self.computed as usize;
        if self.computed + 1 != n || self.num_known != computed || self.ids.len() != computed {
            return false;
        }
        self.ids.push(token_id);
        self.num_known += 1;
        self.computed = n;
        true
    }

    /// Takes back the last [`commit_next`](Self::commit_next).
    pub(crate) fn uncommit_last(&mut self) {
        self.ids.pop();
        self.num_known -= 1;
        self.computed -= 1;
    }

    /// Whether a block that could enter the index became full when `n` tokens were computed.
    #[inline]
    pub(crate) fn has_filled(&self, n: u64, block_size: u64) -> bool {
        n >= (self.num_indexed as u64 + 1) * block_size
    }

    /// How many of the first `n` ids are not known.
    #[inline]
    pub(crate) fn num_unknown(&self, n: u64) -> u64 {
        let num_kept = self.ids.len().min(n as usize);
        let missing = n - num_kept as u64;
        if self.num_known >= num_kept {
            return missing;
        }
        missing + self.ids[self.num_known..num_kept].iter().filter(|&&id| id == UNKNOWN).count() as u64
    }

    /// Fills the unknown ids among the first `n` in order, from the front of `token_ids`; returns the rest.
    pub(crate) fn fill<'a>(&mut self, n: u64, mut token_ids: &'a [TokenId]) -> &'a [TokenId] {
        let n = n as usize;
        for at in self.num_known..self.ids.len().min(n) {
            if self.ids[at] == UNKNOWN {
                self.ids[at] = token_ids[0];
                token_ids = &token_ids[1..];
            }
        }
        while self.num_known < self.ids.len() && self.ids[self.num_known] != UNKNOWN {
            self.num_known += 1;
        }
        let num_missing = n.saturating_sub(self.ids.len());
        let (missing, rest) = token_ids.split_at(num_missing);
        let is_whole = self.num_known == self.ids.len();
        self.ids.extend_from_slice(missing);
        if is_whole {
            self.num_known = self.ids.len();
        }
        rest
    }

    /// The ids of the positions `start..stop`, if all are known.
    #[inline]
    pub(crate) fn known(&self, start: usize, stop: usize) -> Option<&[TokenId]> {
        let ids = self.ids.get(start..stop)?;
        (stop <= self.num_known || !ids.contains(&UNKNOWN)).then_some(ids)
    }

    /// Takes the ids and items of a prompt; the row is empty.
    pub(crate) fn start(&mut self, token_ids: &[TokenId], items: &[Item<'_>], namespace: u32) {
        self.ids.extend_from_slice(token_ids);
        self.num_known = token_ids.len();
        self.namespace = namespace;
        if !items.is_empty() {
            let kept = items.iter().map(|item| KeptItem {
                start: item.start,
                stop: item.stop,
                key: Arc::from(item.key),
            });
            self.items = Some(Box::new(kept.collect()));
        }
    }

    /// Becomes the chain of a fork of the first `n` tokens; the row is empty. The caller counts the namespace.
    pub(crate) fn fork_from(&mut self, parent: &Self, n: u64, block_size: u64) {
        let num_kept = parent.ids.len().min(n as usize);
        self.ids.extend_from_slice(&parent.ids[..num_kept]);
        self.num_known = parent.num_known.min(num_kept);
        self.num_indexed = parent.num_indexed.min((n / block_size) as usize);
        self.computed = n;
        self.namespace = parent.namespace;
        self.is_stale = parent.is_stale && n > 0;
        self.items.clone_from(&parent.items);
        self.cut_items(n);
    }

    /// Forgets every id at or past `n`, and what the index had of it.
    pub(crate) fn truncate(&mut self, n: u64, block_size: u64) {
        self.ids.truncate(n as usize);
        self.num_known = self.num_known.min(n as usize);
        self.num_indexed = self.num_indexed.min((n / block_size) as usize);
        self.computed = self.computed.min(n);
        self.is_stale &= n > 0;
        self.cut_items(n);
    }

    fn cut_items(&mut self, n: u64) {
        let Some(items) = &mut self.items else { return };
        items.retain(|item| item.start < n);
        for item in items.iter_mut() {
            item.stop = item.stop.min(n);
        }
        if items.is_empty() {
            self.items = None;
        }
    }

    /// Empties the row. The caller has released the namespace.
    pub(crate) fn clear(&mut self) {
        let mut ids = std::mem::take(&mut self.ids);
        ids.clear();
        ids.shrink_to(KEPT_TOKEN_IDS);
        *self = Self { ids, namespace: NO_KEY, ..Self::default() };
    }

    /// What is wrong with the counts, for the audit.
    pub(crate) fn fault(&self) -> Option<String> {
        let found = self.ids.iter().position(|&id| id == UNKNOWN).unwrap_or(self.ids.len());
        if found == self.num_known {
            return None;
        }
        Some(format!("{} leading token ids known, but {found} found", self.num_known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_out_of_order_leave_gaps_that_a_commit_fills() {
        let mut chain = Chain::default();
        chain.append_one(0, 10);
        chain.append(3, &[13, 14]);
        assert_eq!((chain.num_unknown(5), chain.num_unknown(3), chain.num_unknown(7)), (2, 2, 4));
        assert_eq!((chain.known(0, 2), chain.known(3, 5)), (None, Some(&[13, 14][..])));
        assert_eq!(chain.first_conflict(2, &[99, 13, 15]), Some((4, 14, 15)));
        assert_eq!(chain.fill(2, &[11, 12]), [12]);
        assert_eq!((chain.num_known, chain.known(1, 2), chain.known(2, 3)), (2, Some(&[11][..]), None));
        assert_eq!(chain.fill(7, &[12, 15, 16]), [0_u32; 0]);
        assert_eq!(chain.known(0, 7), Some(&[10, 11, 12, 13, 14, 15, 16][..]));
        assert_eq!(chain.fault(), None);
        chain.num_known = 3;
        assert!(chain.fault().is_some());
    }

    #[test]
    fn truncation_forgets_and_cuts() {
        let mut chain = Chain::default();
        let items = [Item { start: 1, stop: 4, key: "x" }, Item { start: 5, stop: 6, key: "y" }];
        chain.start(&[1, 2, 3, 4, 5, 6], &items, 0);
        let mut fork = Chain::default();
        fork.fork_from(&chain, 2, 2);
        assert_eq!(fork.items.as_ref().map(|items| (items.len(), items[0].stop)), Some((1, 2)));
        assert!(chain.has_ids_past(4) && !fork.has_ids_past(2));
        chain.truncate(1, 2);
        assert!(chain.items.is_none() && chain.num_unknown(3) == 2);
    }
}

//! What a sequence knows of its tokens, and how far the prefix index follows it.
//!
//! Ids are known or not: those of a prompt are kept whole from the start, others come with an append or a commit, and a
//! position whose id never came stays a gap. Blocks enter the index one after the other, `num_indexed` of them so far;
//! the first that can't ends it for good (until a truncation takes that block away). What entered has its ids in the
//! index, so they are dropped here: `base` is the position of the first id that is kept, a block boundary.
//!
//! Costs: O(ids given) for everything, plus, where ids came out of order, O(ids kept).

use std::sync::Arc;

use crate::ids::TokenId;
use crate::index::NO_KEY;
use crate::prompt::{Item, overlapping};

/// The next sequence at a place gets the memory of the last one's token ids, up to this many (256 KiB).
const KEPT_TOKEN_IDS: usize = 65_536;

/// In place of an id that is not known: none that a token can have.
const UNKNOWN: TokenId = TokenId::MAX;

/// A media item of a prompt, kept.
#[derive(Clone, Debug)]
struct KeptItem {
    start: u64,
    stop: u64,
    key: Arc<str>,
}

/// One sequence's. One cache line.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Chain {
    /// From `base` on by position, [`UNKNOWN`] in a gap. Past the length while a prompt is not all there.
    ids: Vec<TokenId>,
    /// Ids before are those of blocks that entered the index.
    base: u64,
    /// Leading blocks that are nodes of the index, each the child of the one before.
    num_indexed: usize,
    /// Key id of the namespace.
    namespace: u32,
    /// Whether there may be gaps.
    has_gaps: bool,
    /// Older than the last reset of the index: its content must not enter.
    is_stale: bool,
    /// Sorted and disjoint; none for most.
    #[expect(clippy::box_collection, reason = "one word for every sequence that has none")]
    items: Option<Box<Vec<KeptItem>>>,
}

impl Chain {
    /// Leading blocks that are nodes of the index.
    #[inline]
    pub(crate) fn num_indexed(&self) -> usize {
        self.num_indexed
    }

    /// Key id of the namespace.
    #[inline]
    pub(crate) fn namespace(&self) -> u32 {
        self.namespace
    }

    /// Whether its content is older than the last reset of the index.
    #[inline]
    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// The next block entered the index.
    #[inline]
    pub(crate) fn enter_block(&mut self) {
        self.num_indexed += 1;
    }

    /// The index forgot everything. A sequence with tokens must enter nothing more.
    pub(crate) fn forget_index(&mut self, has_tokens: bool) {
        self.num_indexed = 0;
        self.is_stale |= has_tokens;
    }

    /// Whether media items are kept.
    #[inline]
    pub(crate) fn has_items(&self) -> bool {
        self.items.is_some()
    }

    /// The items that overlap the positions `start..stop`.
    pub(crate) fn items_within(&self, start: u64, stop: u64) -> impl Iterator<Item = Item<'_>> {
        let kept = self.items.as_ref().map_or(&[][..], |items| items);
        let overlapping = overlapping(kept, |item| (item.start, item.stop), start, stop);
        overlapping.iter().map(|item| Item { start: item.start, stop: item.stop, key: &item.key })
    }

    /// Whether ids at and past `length` are kept: the rest of a prompt.
    #[inline]
    pub(crate) fn has_ids_past(&self, length: u64) -> bool {
        self.base + self.ids.len() as u64 > length
    }

    /// The first id among those for the positions from `position` on that differs from a kept one: its position, the
    /// kept one, and the id.
    pub(crate) fn first_conflict(
        &self,
        position: u64,
        token_ids: &[TokenId],
    ) -> Option<(u64, TokenId, TokenId)> {
        let kept = self.ids.get((position - self.base) as usize..)?;
        let at = kept.iter().zip(token_ids).position(|(kept, id)| *kept != UNKNOWN && kept != id)?;
        Some((position + at as u64, kept[at], token_ids[at]))
    }

    /// Keeps the ids of tokens from `position` on, which agree with what is kept already.
    pub(crate) fn append(&mut self, position: u64, token_ids: &[TokenId]) {
        let at = (position - self.base) as usize;
        if at > self.ids.len() {
            self.ids.resize(at, UNKNOWN);
            self.has_gaps = true;
        }
        let num_kept = (self.ids.len() - at).min(token_ids.len());
        self.keep(&token_ids[num_kept..]);
    }

    /// Keeps further ids. Mostly one: no copy of a run.
    #[inline]
    fn keep(&mut self, token_ids: &[TokenId]) {
        match token_ids {
            [token_id] => self.ids.push(*token_id),
            _ => self.ids.extend_from_slice(token_ids),
        }
    }

    /// Whether a block that could enter the index became full when `n` tokens were computed.
    #[inline]
    pub(crate) fn has_filled(&self, n: u64, block_size: u64) -> bool {
        n >= (self.num_indexed as u64 + 1) * block_size
    }

    /// How many of the first `n` ids are not known.
    #[inline]
    pub(crate) fn num_unknown(&self, n: u64) -> u64 {
        let wanted = n.saturating_sub(self.base);
        let num_kept = self.ids.len().min(wanted as usize);
        let missing = wanted - num_kept as u64;
        if !self.has_gaps {
            return missing;
        }
        missing + self.ids[..num_kept].iter().filter(|&&id| id == UNKNOWN).count() as u64
    }

    /// Fills the unknown ids among the first `n` in order, from the front of `token_ids`; returns the rest.
    #[inline]
    pub(crate) fn fill<'a>(&mut self, n: u64, mut token_ids: &'a [TokenId]) -> &'a [TokenId] {
        let wanted = n.saturating_sub(self.base) as usize;
        if self.has_gaps {
            token_ids = self.fill_gaps(wanted, token_ids);
        }
        let (missing, rest) = token_ids.split_at(wanted.saturating_sub(self.ids.len()));
        self.keep(missing);
        rest
    }

    /// Fills the gaps among the first `wanted` kept ids; returns the rest of `token_ids`.
    #[inline(never)]
    fn fill_gaps<'a>(&mut self, wanted: usize, mut token_ids: &'a [TokenId]) -> &'a [TokenId] {
        let num_kept = self.ids.len().min(wanted);
        for id in self.ids[..num_kept].iter_mut().filter(|id| **id == UNKNOWN) {
            *id = token_ids[0];
            token_ids = &token_ids[1..];
        }
        self.has_gaps = self.ids.contains(&UNKNOWN);
        token_ids
    }

    /// The ids of the positions `start..stop`, if all are known and kept here.
    #[inline]
    pub(crate) fn known(&self, start: u64, stop: u64) -> Option<&[TokenId]> {
        let ids = self.ids.get(start.checked_sub(self.base)? as usize..(stop - self.base) as usize)?;
        (!self.has_gaps || !ids.contains(&UNKNOWN)).then_some(ids)
    }

    /// Whether the ids of the block at `start` were dropped, for the index has them.
    pub(crate) fn has_dropped(&self, start: u64) -> bool {
        start < self.base
    }

    /// Drops the ids of blocks that entered the index, where that moves no more of the others.
    #[inline]
    pub(crate) fn drop_indexed(&mut self, block_size: u64, spare: &mut SpareIds) {
        let behind = self.num_indexed as u64 * block_size;
        let num_dropped = (behind - self.base) as usize;
        if num_dropped == self.ids.len() {
            self.ids.clear();
            spare.give_back(&mut self.ids);
        } else if num_dropped * 2 >= self.ids.len() {
            self.ids.drain(..num_dropped);
        } else {
            return;
        }
        self.base = behind;
    }

    /// Takes the ids and items of a prompt, the first of which the index has; the chain is empty.
    pub(crate) fn start(
        &mut self,
        (token_ids, num_indexed): (&[TokenId], usize),
        (items, block_size): (&[Item<'_>], u64),
        namespace: u32,
        spare: &mut SpareIds,
    ) {
        self.base = num_indexed as u64 * block_size;
        self.num_indexed = num_indexed;
        let kept = &token_ids[self.base as usize..];
        spare.take_for(&mut self.ids, kept.len());
        self.ids.extend_from_slice(kept);
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

    /// Becomes the chain of a fork of the first `n` tokens; the chain is empty. The caller counts the namespace.
    /// `cut` are the ids of the index's block that `n` lies in.
    pub(crate) fn fork_from<'a>(
        &mut self,
        parent: &Self,
        n: u64,
        block_size: u64,
        cut: impl FnOnce() -> &'a [TokenId],
    ) {
        if n < parent.base {
            self.restore(n, block_size, cut);
        } else {
            let num_kept = parent.ids.len().min((n - parent.base) as usize);
            self.ids.extend_from_slice(&parent.ids[..num_kept]);
            self.base = parent.base;
            self.has_gaps = parent.has_gaps;
        }
        self.num_indexed = parent.num_indexed.min((n / block_size) as usize);
        self.namespace = parent.namespace;
        self.is_stale = parent.is_stale && n > 0;
        self.items.clone_from(&parent.items);
        self.cut_items(n);
    }

    /// Forgets every id at or past `n`, and what the index had of it. `cut` are the ids of the index's block that `n`
    /// lies in.
    pub(crate) fn truncate<'a>(&mut self, n: u64, block_size: u64, cut: impl FnOnce() -> &'a [TokenId]) {
        if n < self.base {
            self.restore(n, block_size, cut);
        } else {
            self.ids.truncate((n - self.base) as usize);
        }
        self.num_indexed = self.num_indexed.min((n / block_size) as usize);
        self.is_stale &= n > 0;
        self.cut_items(n);
    }

    /// Keeps exactly the ids between the start of the block that `n` lies in and `n`.
    fn restore<'a>(&mut self, n: u64, block_size: u64, cut: impl FnOnce() -> &'a [TokenId]) {
        let offset = n % block_size;
        self.ids.clear();
        if offset > 0 {
            self.ids.extend_from_slice(&cut()[..offset as usize]);
        }
        self.base = n - offset;
        self.has_gaps = false;
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

    /// Empties it. The caller has released the namespace.
    pub(crate) fn clear(&mut self) {
        let mut ids = std::mem::take(&mut self.ids);
        ids.clear();
        ids.shrink_to(KEPT_TOKEN_IDS);
        *self = Self { ids, namespace: NO_KEY, ..Self::default() };
    }

    /// What is wrong with the marks, for the audit.
    pub(crate) fn fault(&self, computed: u64, block_size: u64) -> Option<String> {
        if !self.has_gaps && self.ids.contains(&UNKNOWN) {
            return Some("a token id is not known, but no gap is marked".to_owned());
        }
        if self.base > computed || !self.base.is_multiple_of(block_size) {
            return Some(format!("token ids kept from {} on, of {computed} computed", self.base));
        }
        None
    }
}

/// Memory for the ids of long prompts, which sequences need from the admission to the commit only: handed from one to
/// the next, so that it stays warm.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpareIds {
    long: Vec<Vec<TokenId>>,
    /// What sequences had before, to be given back to them.
    short: Vec<Vec<TokenId>>,
}

impl SpareIds {
    /// Ids that are worth it.
    const LONG: usize = 256;
    /// Prompts that are on their way at once, mostly.
    const MOST: usize = 64;

    fn take_for(&mut self, ids: &mut Vec<TokenId>, num_ids: usize) {
        if num_ids > Self::LONG
            && ids.capacity() < num_ids
            && let Some(long) = self.long.pop()
        {
            self.short.push(std::mem::replace(ids, long));
        }
    }

    fn give_back(&mut self, ids: &mut Vec<TokenId>) {
        if ids.capacity() > Self::LONG && self.long.len() < Self::MOST {
            self.long.push(std::mem::replace(ids, self.short.pop().unwrap_or_default()));
        }
    }
}

#[cfg(test)]
impl Chain {
    /// Breaks the count of indexed blocks, for the tests of the audit.
    pub(crate) fn plant_num_indexed(&mut self, num_indexed: usize) {
        self.num_indexed = num_indexed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_out_of_order_leave_gaps_that_a_commit_fills() {
        let mut chain = Chain::default();
        chain.append(0, &[10]);
        chain.append(3, &[13, 14]);
        assert_eq!((chain.num_unknown(5), chain.num_unknown(3), chain.num_unknown(7)), (2, 2, 4));
        assert_eq!((chain.known(0, 2), chain.known(3, 5)), (None, Some(&[13, 14][..])));
        assert_eq!(chain.first_conflict(2, &[99, 13, 15]), Some((4, 14, 15)));
        assert_eq!(chain.fill(2, &[11, 12]), [12]);
        assert_eq!((chain.known(1, 2), chain.known(2, 3)), (Some(&[11][..]), None));
        assert_eq!(chain.fill(7, &[12, 15, 16]), [0_u32; 0]);
        assert_eq!(chain.known(0, 7), Some(&[10, 11, 12, 13, 14, 15, 16][..]));
        assert_eq!(chain.fault(7, 2), None);
        chain.ids[2] = UNKNOWN;
        assert!(chain.fault(7, 2).is_some());
    }

    fn prompt(chain: &mut Chain, items: &[Item<'_>], spare: &mut SpareIds) {
        chain.start((&[1, 2, 3, 4, 5, 6], 0), (items, 2), 0, spare);
    }

    #[test]
    fn truncation_forgets_and_cuts() {
        let mut chain = Chain::default();
        let items = [Item { start: 1, stop: 4, key: "x" }, Item { start: 5, stop: 6, key: "y" }];
        prompt(&mut chain, &items, &mut SpareIds::default());
        let mut fork = Chain::default();
        fork.fork_from(&chain, 2, 2, || &[]);
        assert_eq!(fork.items.as_ref().map(|items| (items.len(), items[0].stop)), Some((1, 2)));
        assert!(chain.has_ids_past(4) && !fork.has_ids_past(2));
        chain.truncate(1, 2, || &[]);
        assert!(chain.items.is_none() && chain.num_unknown(3) == 2);
    }

    #[test]
    fn what_the_index_has_is_dropped_and_restored() {
        let (mut chain, mut spare) = (Chain::default(), SpareIds::default());
        prompt(&mut chain, &[], &mut spare);
        chain.num_indexed = 1;
        chain.drop_indexed(2, &mut spare); // would move more than it drops
        assert_eq!(chain.known(0, 2), Some(&[1, 2][..]));
        chain.num_indexed = 2;
        chain.drop_indexed(2, &mut spare);
        assert_eq!((chain.known(0, 2), chain.known(4, 6)), (None, Some(&[5, 6][..])));
        assert!(chain.has_dropped(2) && !chain.has_dropped(4));
        let mut fork = Chain::default();
        fork.fork_from(&chain, 3, 2, || &[3, 4]);
        assert_eq!((fork.known(2, 3), fork.num_unknown(3), fork.fault(3, 2)), (Some(&[3][..]), 0, None));
        chain.truncate(1, 2, || &[1, 2]);
        assert_eq!((chain.known(0, 1), chain.num_unknown(2)), (Some(&[1][..]), 1));
    }
}

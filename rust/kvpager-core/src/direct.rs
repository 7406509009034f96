//! The commit of a decode step: one token a row, whose id comes with it, at the speed of memory.
//!
//! While a sequence fills its tail, the ids it commits go *direct*: to the place of the tail's tokens in the index, where
//! they are wanted when the block is full, and not to the sequence's chain first. So a token of a step touches the line of
//! its sequence and the line of its block's tokens, and a block that is full is hashed and compared where it lies.
//!
//! Invariants, audited: while a run `is_direct`, the chain is in the index up to the tail, it knows the ids of the computed
//! tokens and no others, and keeps none itself: those from its base, the start of the tail, on are the first tokens of the
//! tail, less than all of it. Whoever changes the sequence other than by this commit and by appends without ids
//! closes the run first ([`close_direct`]): the ids go to the chain, which the rest of the crate goes by.
//!
//! The tail is not shared meanwhile: the run is opened over a token that is appended but not committed, such a block
//! can't be forked, and a fork of the sequence closes it. Nor is it in the index: the append took it out.
//!
//! Costs: O(1) a row, O(S) once a block.

use crate::admission::check_token_ids;
use crate::append::Scratch;
use crate::chain::{Chain, SpareIds};
use crate::commit::collapse;
use crate::hash::Hash;
use crate::index::{AHEAD, Index, Parent};
use crate::keys::NO_KEY;
use crate::manager::BlockManager;
use crate::pool::{INDEXED, Pool};
use crate::sequence::{Sequence, SequenceTable, View};
use crate::{BlockId, Config, Slot, TokenId};

impl BlockManager {
    /// The commit of a decode step, in one pass: each row in `scratch.rows` has computed one token more, whose id comes
    /// with it. `ns` as in a commit of all rows; `None`: each row's length. Anything else, a bad id too, takes back what
    /// the pass did and leaves all to the general way.
    pub(crate) fn commit_step(&mut self, ns: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> bool {
        let Some(token_ids) = token_ids else { return false };
        let Self { config, sequences, scratch, copies, pool, .. } = self;
        let Scratch { rows: batch, filled, .. } = scratch;
        let num_rows = batch.len();
        let is_one_each = token_ids.len() == num_rows && ns.is_none_or(|ns| ns.len() == num_rows);
        if copies.len() > 0 || !config.prefix_caching() || !is_one_each {
            return false;
        }
        filled.clear();
        let SequenceTable { rows, tables, chains, spare, .. } = sequences;
        let mut num_done = 0;
        'pass: while num_done < num_rows {
            let (rest, tokens) =
                (batch[num_done..].iter().zip(&token_ids[num_done..]), &mut pool.index.tokens);
            num_done += match ns {
                None => commit_direct(rows, tokens, rest.map(|(&row, &id)| (row, id, None))),
                Some(ns) => {
                    let rest = rest.zip(&ns[num_done..]);
                    commit_direct(rows, tokens, rest.map(|((&row, &id), &n)| (row, id, Some(n))))
                }
            };
            // Rows that complete a block mostly stand together: no new start for each.
            while let Some(&row) = batch.get(num_done) {
                let (sequence, chain) = (&mut rows[row as usize], &mut chains[row as usize]);
                let (n, table) = (ns.map_or(sequence.length, |ns| ns[num_done]), &tables[row as usize]);
                let next = (n, token_ids[num_done]);
                if !commit_one(config, sequence, table, chain, &mut pool.index, spare, next) {
                    break 'pass;
                }
                if chain.has_filled(n, config.block_size()) {
                    filled.push((row, n));
                }
                num_done += 1;
                if batch.get(num_done).is_some_and(|&row| rows[row as usize].goes_on_direct()) {
                    break;
                }
            }
        }
        // Only now that the pass has read the ids: they come from memory while it works.
        if num_done < num_rows || check_token_ids(token_ids, "token_ids").is_err() {
            for &row in &batch[..num_done] {
                undo(&mut rows[row as usize], &mut chains[row as usize]);
            }
            return false;
        }
        self.index_filled();
        true
    }

    /// Indexes what the rows in `scratch.filled` have filled.
    #[inline(never)]
    fn index_filled(&mut self) {
        let filled = std::mem::take(&mut self.scratch.filled);
        for some in filled.chunks(AHEAD) {
            self.hash_filled(some);
            for (at, &(row, n)) in some.iter().enumerate() {
                match self.scratch.hashes[at] {
                    Some((hash, parent)) => self.index_direct(row as usize, hash, &parent),
                    // A sequence named again may have gone on since: index up to what this mention reached.
                    None => self.index_full_blocks(row as usize, n - 1, n),
                }
            }
        }
        self.scratch.filled = filled;
    }

    /// Leaves in `scratch.hashes` the hash of each row's block where its tokens lie with the index. Then what finding and
    /// entering them will touch is looked at, all in one go, so that the cache misses run side by side.
    fn hash_filled(&mut self, filled: &[(u32, u64)]) {
        let Self {
            sequences: SequenceTable { tables, chains, .. }, pool: Pool { index, .. }, scratch, ..
        } = self;
        scratch.hashes.clear();
        scratch.hashes.extend(filled.iter().map(|&(row, n)| {
            let chain = &chains[row as usize];
            if chain.has_ids_past(n - 1) {
                return None;
            }
            let (parent, block) = next_node(index, chain, &tables[row as usize]);
            Some((index.chain(&parent, index.tokens_of(block), [0, 0]), parent))
        }));
        let look_at = |seen, (hash, _): &(Hash, Parent)| seen ^ index.look_before_insert(*hash);
        std::hint::black_box(scratch.hashes.iter().flatten().fold(0, look_at));
    }

    /// Indexes the block that a direct run has filled.
    fn index_direct(&mut self, row: usize, hash: Hash, parent: &Parent) {
        let Self { config, sequences: SequenceTable { rows, tables, chains, .. }, pool, .. } = self;
        let (sequence, chain, table) = (&mut rows[row], &mut chains[row], &mut tables[row]);
        let block = table[chain.num_indexed];
        match pool.index.find(parent, hash, pool.index.tokens_of(block), NO_KEY) {
            Err(gap) => {
                pool.insert_in_place(gap, block, parent, hash, NO_KEY);
            }
            Ok(same) => collapse(pool, sequence, table, chain.num_indexed, same),
        }
        chain.pass_on(config.block_size());
        sequence.is_direct = true; // the next block begins the same way
    }

    /// See the module header.
    #[inline]
    pub(crate) fn close_direct(&mut self, row: u32) {
        let SequenceTable { rows, tables, chains, .. } = &mut self.sequences;
        let row = row as usize;
        close_direct(&mut rows[row], &tables[row], &mut chains[row], &self.pool.index);
    }

    /// What is wrong with a direct run, for the audit.
    pub(crate) fn direct_fault(&self, sequence: View<'_>, chain: &Chain) -> Option<String> {
        if !sequence.is_direct {
            return None;
        }
        let block_size = self.config.block_size();
        let start = chain.num_indexed as u64 * block_size;
        let tail = sequence.table.get(chain.num_indexed).filter(|&&tail| tail < self.pool.watermark);
        let is_own = |&tail: &BlockId| self.pool.ref_count(tail) == 1 && !self.pool.has(tail, INDEXED);
        let is_sound = tail.map_or(sequence.computed == start, is_own)
            && chain.base() == start
            && chain.knows_exactly(start)
            && !chain.is_stale
            && (start..start + block_size).contains(&sequence.computed);
        (!is_sound).then(|| "its ids can't lie with the index".to_owned())
    }
}

/// The node that a chain's next block will be a child of, and that block.
#[inline]
fn next_node(index: &Index, chain: &Chain, table: &[BlockId]) -> (Parent, BlockId) {
    let parent = match chain.num_indexed {
        0 => index.root(chain.namespace),
        num_indexed => index.parent(table[num_indexed - 1]),
    };
    (parent, table[chain.num_indexed])
}

/// Commits one token each to the rows in front that have a direct run which goes on; how many. Each comes with the id and
/// what is computed then, `None`: all its tokens. A function of its own, so that all the loop needs stays in registers.
#[inline(never)]
fn commit_direct(
    rows: &mut [Sequence],
    tokens: &mut [TokenId],
    steps: impl ExactSizeIterator<Item = (u32, TokenId, Option<u64>)>,
) -> usize {
    let num_rows = steps.len();
    for (at, (row, token_id, n)) in steps.enumerate() {
        let sequence = &mut rows[row as usize];
        let n = n.unwrap_or(sequence.length);
        if sequence.length != n || sequence.computed + 1 != n || !sequence.goes_on_direct() {
            return at;
        }
        tokens[(sequence.slot_base + sequence.computed as Slot) as usize] = token_id;
        sequence.computed = n;
    }
    num_rows
}

/// Commits the next token of a row, whichever way it can go; false if it can't.
fn commit_one(
    config: &Config,
    sequence: &mut Sequence,
    table: &[BlockId],
    chain: &mut Chain,
    index: &mut Index,
    spare: &mut SpareIds,
    (n, token_id): (u64, TokenId),
) -> bool {
    if sequence.computed + 1 != n || n > sequence.length {
        return false;
    }
    let is_last = n == sequence.length;
    if is_last && (sequence.is_direct || open_direct(config, sequence, table, chain, index, spare)) {
        index.tokens[(sequence.slot_base + sequence.computed as Slot) as usize] = token_id;
        sequence.is_direct = !chain.has_filled(n, config.block_size());
    } else {
        close_direct(sequence, table, chain, index);
        if !chain.commit_next(sequence.computed, token_id) {
            return false;
        }
    }
    sequence.computed = n;
    true
}

/// Opens a direct run over the one token that is appended but not committed, if the chain allows it.
fn open_direct(
    config: &Config,
    sequence: &mut Sequence,
    table: &[BlockId],
    chain: &mut Chain,
    index: &mut Index,
    spare: &mut SpareIds,
) -> bool {
    let block_size = config.block_size();
    let start = chain.num_indexed as u64 * block_size;
    let is_next = (start..start.saturating_add(block_size)).contains(&sequence.computed);
    let is_whole = chain.base() <= start && chain.knows_exactly(sequence.computed);
    if !is_next || !is_whole || chain.is_stale || chain.items.is_some() {
        return false;
    }
    let (tail, offset) = (table[chain.num_indexed], sequence.computed - start);
    chain.hand_over(start, &mut index.tokens_mut(tail)[..offset as usize], spare);
    sequence.slot_base = config.slot(tail, offset) - sequence.computed as Slot;
    true
}

/// Brings the ids of a direct run, if there is one, home to the chain.
#[inline]
pub(crate) fn close_direct(sequence: &mut Sequence, table: &[BlockId], chain: &mut Chain, index: &Index) {
    if sequence.is_direct {
        let num_ids = (sequence.computed - chain.base()) as usize;
        if num_ids > 0 {
            chain.take_back(&index.tokens_of(table[chain.num_indexed])[..num_ids]);
        }
        sequence.is_direct = false;
    }
}

/// Takes one token of a commit back, whichever way it went.
fn undo(sequence: &mut Sequence, chain: &mut Chain) {
    if chain.has_ids_past(sequence.computed - 1) {
        chain.uncommit_last();
    } else {
        sequence.is_direct = true;
    }
    sequence.computed -= 1;
}

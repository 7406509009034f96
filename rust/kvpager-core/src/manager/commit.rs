//! Commit: the keys and values of a sequence's first n tokens are written, so what became full enters the index.
//!
//! Only committed blocks can be found: a forward pass that fails or still runs can't poison the cache. A block enters
//! if its ids are all known and the block before it is indexed by this sequence; its content is then compared with what
//! the index has, and a duplicate collapses: the table is pointed at the block that is there, its own goes back.
//!
//! Costs: O(1 + ids + blocks that became full), nothing allocated once warm.

use super::BlockManager;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SequenceId, TokenId};
use crate::index::{AHEAD, Content, NO_KEY};
use crate::prompt::{check_num_ids, check_token_ids};
use crate::sequences::Place;

impl BlockManager {
    /// Says that the keys and values of the first `n` tokens are written: absolute, from the computed tokens to the
    /// length. Blocks that became full enter the prefix index. Without an index every token counts as computed when it
    /// is appended, so this only checks. `token_ids`, if they came only now, are those of the positions below `n` not
    /// known yet, in order, exactly as many. O(1 + ids + blocks that became full).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] if `n` is out of range (without an index: not the length), for a
    /// bad id or another number of ids; [`Error::State`] if it reaches a token that waits for an untaken copy.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.admit(1, &Prompt::new(&[1, 2, 3]), &AdmitOptions::default(), &mut Vec::new())?;
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3]))?, 0);
    /// manager.commit(1, 3, None)?;
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3]))?, 2);
    ///
    /// manager.append_token(1, None)?; // the step that computes the token sampled from the prompt
    /// manager.commit(1, 4, Some(&[9]))?; // its id was known only then
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3, 9, 5]))?, 4);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit(&mut self, sequence_id: SequenceId, n: u64, token_ids: Option<&[TokenId]>) -> Result<()> {
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        let place = self.sequences.find(sequence_id)?;
        let (computed, length) = (self.computed(place), self.sequences.counters(place).length());
        if n < computed || n > length {
            return Err(self.out_of_range(place, computed, n, "n"));
        }
        if let Some(token_ids) = token_ids {
            let wanted = self.sequences.chain(place).num_unknown(n);
            check_num_ids(wanted, "one for each position not known yet", token_ids)?;
        }
        self.check_no_untaken_copy(place, n)?;
        if let Some(token_ids) = token_ids {
            self.sequences.chain_mut(place).fill(n, token_ids);
        }
        self.commit_place(place, n);
        Ok(())
    }

    /// [`commit`](Self::commit) of a batch, in order, all or nothing; an id named twice commits twice. `token_ids`, if
    /// given, are those of all rows' positions not known yet, one row after the other.
    /// O(ids + blocks that became full).
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit), and [`Error::Argument`] if `ns` has another length than `ids`.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.create_sequence(1)?;
    /// manager.create_sequence(2)?;
    /// manager.append_batch(&[1, 2], Some(&[2, 1]), None, &mut Vec::new())?;
    /// manager.commit_batch(&[1, 2], &[2, 1], Some(&[5, 6, 7]))?;
    /// assert_eq!(manager.stats().indexed, 1); // the block [5, 6]
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit_batch(
        &mut self,
        ids: &[SequenceId],
        ns: &[u64],
        token_ids: Option<&[TokenId]>,
    ) -> Result<()> {
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        if ids.len() != ns.len() {
            let wanted = format!("one length for each of {} ids", ids.len());
            return Err(Error::argument("ns", wanted, format!("{} lengths", ns.len())));
        }
        self.scratch.find(&self.sequences, ids)?;
        self.commit_found(Some(ns), token_ids)
    }

    /// [`commit_batch`](Self::commit_batch) for the sequences whose places stand in the scratch, with sound ids; all
    /// tokens of each, if `ns` is `None`.
    pub(super) fn commit_found(&mut self, ns: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Result<()> {
        self.check_commits(ns, token_ids)?;
        let places = std::mem::take(&mut self.scratch.places);
        let mut token_ids = token_ids;
        for (at, &place) in places.iter().enumerate() {
            let n = self.committed_length(ns, at, place);
            if let Some(rest) = &mut token_ids {
                *rest = self.sequences.chain_mut(place).fill(n, rest);
            }
            self.commit_place(place, n);
        }
        self.scratch.places = places;
        Ok(())
    }

    /// Tokens whose keys and values are known to be written. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_token(1, None)?;
    /// assert_eq!(manager.num_computed_tokens(1)?, 1); // without an index, as soon as it is appended
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn num_computed_tokens(&self, sequence_id: SequenceId) -> Result<u64> {
        self.sequences.find(sequence_id).map(|place| self.computed(place))
    }

    /// Tokens that a batch commits of the sequence it mentions at `at`.
    #[inline]
    fn committed_length(&self, ns: Option<&[u64]>, at: usize, place: Place) -> u64 {
        ns.map_or_else(|| self.sequences.counters(place).length(), |ns| ns[at])
    }

    /// Commits the first `n` tokens of a sequence; everything has been checked.
    #[inline]
    fn commit_place(&mut self, place: Place, n: u64) {
        if !self.config.prefix_caching() {
            return;
        }
        let before = self.sequences.counters_mut(place).compute(n);
        // Mostly no block that could enter became full: no division.
        if self.sequences.chain(place).has_filled(n, self.config.block_size()) {
            self.index_full_blocks(place, before, n);
        }
    }

    /// Indexes the blocks that became full when the computed tokens went from `before` to `n`.
    ///
    /// Longer than 50 lines, because one loop borrows the pool, the table and the chain in turns.
    #[inline(never)]
    fn index_full_blocks(&mut self, place: Place, before: u64, n: u64) {
        let Self { config, pool, sequences, matching, .. } = self;
        let block_size = config.block_size();
        let chain = sequences.chain(place);
        // The block that the computed tokens ended in before must be the next to enter.
        let first = chain.num_indexed();
        let start = first as u64 * block_size;
        if before < start || before >= start + block_size || chain.is_stale() {
            return;
        }
        let behind = (n / block_size) as usize;
        let mut parent = match first {
            0 => pool.index().root(chain.namespace()),
            _ => pool.index().parent(sequences.table(place)[first - 1]),
        };
        let ahead = &mut matching.ahead;
        ahead.clear();
        for logical in first..behind {
            let (chain, table) = (sequences.chain(place), sequences.table(place));
            let (start, block) = (logical as u64 * block_size, table[logical]);
            let at = (logical - first) % AHEAD;
            if at == 0 && behind - first > 1 && !chain.has_items() {
                let stop = behind.min(logical + AHEAD) as u64 * block_size;
                ahead.clear();
                if let Some(ids) = chain.known(start, stop) {
                    pool.index().chain_ahead(&parent, ids, &table[logical..], ahead);
                }
            }
            let Some(token_ids) = chain.known(start, start + block_size) else { break };
            if pool.is_indexed(block) {
                break;
            }
            let (mut key_id, mut key_hash) = (NO_KEY, [0, 0]);
            if chain.has_items() {
                let items = chain.items_within(start, start + block_size);
                (key_id, key_hash) = pool.index_mut().acquire_key(items, start);
            }
            let chained = || pool.index().chain(&parent, token_ids, key_hash);
            let hash = ahead.get(at).copied().unwrap_or_else(chained);
            let content = Content { parent, hash, token_ids, key_id };
            match pool.index().find(&content) {
                Err(gap) => parent = pool.insert(gap, block, &content),
                Ok(same) => {
                    // A duplicate: the table is pointed at the block that is there, its own goes back.
                    pool.index_mut().release_key(key_id);
                    pool.attach(same);
                    sequences.replace_block(place, logical, same);
                    pool.drop_ref(block);
                    parent = pool.index().parent(same);
                }
            }
            sequences.chain_mut(place).enter_block();
        }
        sequences.drop_indexed_ids(place, block_size);
    }

    #[cold]
    fn out_of_range(&self, place: Place, computed: u64, n: u64, argument: &'static str) -> Error {
        let (id, length) = (self.sequences.id(place), self.sequences.counters(place).length());
        let wanted = match (self.config.prefix_caching(), argument) {
            (true, "ns") => format!("{computed} to {length} tokens for sequence {id}"),
            (true, _) => format!("{computed} to {length} tokens"),
            (false, "ns") => format!("the {length} tokens of sequence {id}"),
            (false, _) => format!("the {length} tokens of the sequence"),
        };
        Error::argument(argument, wanted, n)
    }

    /// With the index, what was appended since a copy came to be owed can't be committed before the copy is taken. As
    /// only committed tokens are ever shared, that is all that was appended past the computed tokens.
    #[inline]
    fn check_no_untaken_copy(&self, place: Place, n: u64) -> Result<()> {
        if self.copies.is_empty() || !self.config.prefix_caching() {
            return Ok(());
        }
        let sequence = self.sequences.view(place);
        let computed = self.computed(place);
        let logical = (computed / self.config.block_size()) as usize;
        let waiting = |block: BlockId| Some((block, self.copies.source_of(block)?));
        match sequence.table.get(logical).copied().and_then(waiting) {
            Some((block, source)) if n > computed => {
                let reason = format!(
                    "sequence {} can't be committed to {n} tokens: block {block} still waits for its copy of block \
                     {source} (run `take_copies` first)",
                    sequence.id
                );
                Err(Error::State { reason })
            }
            _ => Ok(()),
        }
    }

    /// Plays a batch of commits through without changing a sequence.
    fn check_commits(&mut self, ns: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Result<()> {
        self.scratch.planned.resize(self.sequences.num_places(), 0);
        let mut checked = Ok(());
        let mut num_unknown = 0;
        for (at, &place) in self.scratch.places.iter().enumerate() {
            let (computed, length) = (self.computed(place), self.sequences.counters(place).length());
            let n = ns.map_or(length, |ns| ns[at]);
            let reached = std::mem::replace(&mut self.scratch.planned[place.index()], n);
            let computed = computed.max(reached);
            if n < computed || n > length {
                checked = Err(self.out_of_range(place, computed, n, "ns"));
                break;
            }
            if token_ids.is_some() {
                let chain = self.sequences.chain(place);
                // A first mention counts from the start; only a further one has reached a length.
                num_unknown += chain.num_unknown(n);
                num_unknown -= if reached > 0 { chain.num_unknown(reached) } else { 0 };
            }
        }
        self.scratch.forget_plans();
        checked?;
        if let Some(token_ids) = token_ids {
            check_num_ids(num_unknown, "one for each position not known yet", token_ids)?;
        }
        if !self.copies.is_empty() {
            for (at, &place) in self.scratch.places.iter().enumerate() {
                let n = self.committed_length(ns, at, place);
                self.check_no_untaken_copy(place, n)?;
            }
        }
        Ok(())
    }
}

//! Commit: the keys and values of a sequence's first n tokens are written, so what became full enters the index.
//!
//! Only committed blocks can be found: a forward pass that fails or still runs can't poison the cache. A block enters if
//! its ids are all known and the block before it is indexed by this sequence; its content is then compared with what
//! the index has, and a duplicate collapses: the table is pointed at the block that is there, its own goes back.
//!
//! Costs: O(1 + ids + blocks that became full), nothing allocated once warm.

use crate::admission::{check_token_ids, encode_kept_items};
use crate::index::AHEAD;
use crate::manager::BlockManager;
use crate::pool::{INDEXED, Pool};
use crate::sequence::{BlockTable, Sequence, SequenceTable, View};
use crate::{BlockId, Error, Result, SequenceId, TokenId};

impl BlockManager {
    /// Says that the keys and values of the first `n` tokens are written: absolute, from the computed tokens to the
    /// length. Blocks that became full enter the prefix index. Without an index every token counts as computed when it
    /// is appended, so this only checks. O(1 + blocks that became full).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] if `n` is out of range (without an index: not the length);
    /// [`Error::State`] if it reaches a token that waits for an untaken copy.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.admit(1, &Prompt::new(&[1, 2, 3]), &AdmitOptions::default(), &mut Vec::new())?;
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3]))?, 0);
    /// manager.commit(1, 3)?;
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3]))?, 2);
    /// assert_eq!(manager.num_computed_tokens(1)?, 3);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit(&mut self, sequence_id: SequenceId, n: u64) -> Result<()> {
        let row = self.sequences.find(sequence_id)?;
        self.check_commit_range(row, n)?;
        self.check_no_untaken_copy(row, n)?;
        self.close_direct(row);
        self.commit_row(row, n);
        Ok(())
    }

    /// [`commit`](Self::commit) with ids that came only now: `token_ids` are those of the positions below `n` not known
    /// yet, in order, exactly as many. O(1 + ids + blocks that became full).
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit); [`Error::Argument`] for a bad id or another number of ids.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.admit(1, &Prompt::new(&[1, 2, 3]), &AdmitOptions::default(), &mut Vec::new())?;
    /// manager.commit(1, 3)?;
    /// manager.append_token(1)?; // the step that computes the token sampled from the prompt
    /// manager.commit_ids(1, 4, &[9])?; // its id was known only then
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3, 9, 5]))?, 4);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit_ids(&mut self, sequence_id: SequenceId, n: u64, token_ids: &[TokenId]) -> Result<()> {
        check_token_ids(token_ids, "token_ids")?;
        let row = self.sequences.find(sequence_id)?;
        self.check_commit_range(row, n)?;
        self.close_direct(row);
        let wanted = self.sequences.chains[row as usize].num_unknown(n);
        check_num_ids(wanted, token_ids)?;
        self.check_no_untaken_copy(row, n)?;
        self.sequences.chains[row as usize].fill(n, token_ids);
        self.commit_row(row, n);
        Ok(())
    }

    /// [`commit`](Self::commit) of a batch, in order, all or nothing; an id named twice commits twice. `token_ids`, if
    /// given, are those of all rows' positions not known yet, one row after the other.
    /// O(ids + blocks that became full).
    ///
    /// # Errors
    /// Those of [`commit_ids`](Self::commit_ids), and [`Error::Argument`] if `ns` has another length than `ids`.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.create_sequence(1)?;
    /// manager.create_sequence(2)?;
    /// manager.append_batch(&[1, 2], Some(&[2, 1]), &mut Vec::new())?;
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
        let is_found = ids.len() == ns.len() && self.find_rows(ids).is_ok();
        if is_found && self.commit_step(Some(ns), token_ids) {
            return Ok(());
        }
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        if ids.len() != ns.len() {
            let wanted = format!("one length for each of {} ids", ids.len());
            return Err(Error::argument("ns", wanted, format!("{} lengths", ns.len())));
        }
        self.find_rows(ids)?;
        self.commit_found(ns, token_ids)
    }

    /// [`commit_batch`](Self::commit_batch) for the sequences whose rows stand in `scratch.rows`, with sound ids.
    pub(crate) fn commit_found(&mut self, ns: &[u64], token_ids: Option<&[TokenId]>) -> Result<()> {
        let rows = std::mem::take(&mut self.scratch.rows);
        for &row in &rows {
            self.close_direct(row);
        }
        let checked = self.check_commit_rows(&rows, ns, token_ids);
        if checked.is_ok() {
            let mut token_ids = token_ids;
            for (&row, &n) in rows.iter().zip(ns) {
                if let Some(rest) = &mut token_ids {
                    *rest = self.sequences.chains[row as usize].fill(n, rest);
                }
                self.commit_row(row, n);
            }
        }
        self.scratch.rows = rows;
        checked
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
    /// manager.append_token(1)?;
    /// assert_eq!(manager.num_computed_tokens(1)?, 1); // without an index, as soon as it is appended
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn num_computed_tokens(&self, sequence_id: SequenceId) -> Result<u64> {
        self.sequences.find(sequence_id).map(|row| self.computed(row))
    }

    #[inline]
    pub(crate) fn computed(&self, row: u32) -> u64 {
        if self.config.prefix_caching() {
            self.sequences.rows[row as usize].computed
        } else {
            self.sequences.rows[row as usize].length
        }
    }

    /// Commits the first `n` tokens of a row; everything has been checked.
    #[inline]
    pub(crate) fn commit_row(&mut self, row: u32, n: u64) {
        if !self.config.prefix_caching() {
            return;
        }
        let SequenceTable { rows, chains, .. } = &mut self.sequences;
        let (sequence, chain) = (&mut rows[row as usize], &chains[row as usize]);
        let before = std::mem::replace(&mut sequence.computed, n);
        // Mostly no block that could enter became full: no division.
        if chain.has_filled(n, self.config.block_size()) {
            self.index_full_blocks(row as usize, before, n);
        }
    }

    /// Indexes the blocks that became full when the computed tokens went from `before` to `n`.
    pub(crate) fn index_full_blocks(&mut self, row: usize, before: u64, n: u64) {
        let Self { config, pool, sequences, matching, .. } = self;
        let SequenceTable { rows, tables, chains, spare, .. } = sequences;
        let (chain, table) = (&mut chains[row], &mut tables[row]);
        let block_size = config.block_size() as usize;
        // The block that the computed tokens ended in before must be the next to enter.
        let first = chain.num_indexed;
        let next = before as usize;
        if next < first * block_size || next >= (first + 1) * block_size || chain.is_stale {
            return;
        }
        let num_tokens = n as usize - first * block_size;
        // Mostly it is one block, or what an earlier mention has left of it: no division.
        let num_full = if num_tokens < 2 * block_size {
            usize::from(num_tokens >= block_size)
        } else {
            num_tokens / block_size
        };
        let behind = first + num_full;
        let ahead = &mut matching.ahead;
        ahead.clear();
        let mut parent = match first {
            0 => pool.index.root(chain.namespace),
            _ => pool.index.parent(table[first - 1]),
        };
        for logical in first..behind {
            let at = (logical - first) % AHEAD;
            if at == 0 && behind - first > 1 && chain.items.is_none() {
                let stop = behind.min(logical + AHEAD) * block_size;
                ahead.clear();
                if let Some(ids) = chain.known((logical * block_size) as u64, stop as u64) {
                    pool.index.chain_ahead(&parent, ids, &table[logical..], ahead);
                }
            }
            let start = (logical * block_size) as u64;
            let block = table[logical];
            let Some(token_ids) = chain.known(start, start + block_size as u64) else { break };
            if pool.has(block, INDEXED) {
                break;
            }
            let (mut key, mut key_hash) = (crate::keys::NO_KEY, [0, 0]);
            if chain.items.is_some() {
                encode_kept_items(chain, logical, block_size as u64, &mut matching.bytes);
                (key, key_hash) = pool.index.acquire_key(&matching.bytes);
            }
            let hash = match ahead.get(at) {
                Some(&hash) => hash,
                None => pool.index.chain(&parent, token_ids, key_hash),
            };
            match pool.index.find(&parent, hash, token_ids, key) {
                Err(gap) => parent = pool.insert(gap, block, &parent, hash, token_ids, key),
                Ok(same) => {
                    pool.index.item_keys.release(key);
                    collapse(pool, &mut rows[row], table, logical, same);
                    parent = pool.index.parent(same);
                }
            }
            chain.num_indexed += 1;
        }
        chain.drop_indexed(block_size as u64, spare);
    }

    #[inline]
    fn check_commit_range(&self, row: u32, n: u64) -> Result<()> {
        let computed = self.computed(row);
        if computed <= n && n <= self.sequences.rows[row as usize].length {
            return Ok(());
        }
        Err(self.out_of_range(row, computed, n, "n"))
    }

    #[cold]
    fn out_of_range(&self, row: u32, computed: u64, n: u64, argument: &'static str) -> Error {
        let (id, length) = (self.sequences.ids[row as usize], self.sequences.rows[row as usize].length);
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
    fn check_no_untaken_copy(&self, row: u32, n: u64) -> Result<()> {
        if self.copies.len() == 0 || !self.config.prefix_caching() {
            return Ok(());
        }
        let View { id, table, .. } = self.sequences.view(row);
        let computed = self.computed(row);
        let logical = (computed / self.config.block_size()) as usize;
        let waiting = |block: BlockId| Some((block, self.copies.source_of(block)?));
        match table.get(logical).copied().and_then(waiting) {
            Some((block, source)) if n > computed => {
                let reason = format!(
                    "sequence {id} can't be committed to {n} tokens: block {block} still waits for its copy of block \
                     {source} (run `take_copies` first)"
                );
                Err(Error::State { reason })
            }
            _ => Ok(()),
        }
    }

    /// Plays a batch of commits through without changing a sequence.
    fn check_commit_rows(&mut self, rows: &[u32], ns: &[u64], token_ids: Option<&[TokenId]>) -> Result<()> {
        self.scratch.planned.resize(self.sequences.rows.len(), 0);
        let mut checked = Ok(());
        let mut num_unknown = 0;
        for (&row, &n) in rows.iter().zip(ns) {
            let sequence = &self.sequences.rows[row as usize];
            let reached = self.scratch.planned[row as usize];
            let computed = self.computed(row).max(reached);
            if n < computed || n > sequence.length {
                checked = Err(self.out_of_range(row, computed, n, "ns"));
                break;
            }
            self.scratch.planned[row as usize] = n;
            if token_ids.is_some() {
                let chain = &self.sequences.chains[row as usize];
                num_unknown += chain.num_unknown(n) - chain.num_unknown(reached);
            }
        }
        for &row in rows {
            self.scratch.planned[row as usize] = 0;
        }
        checked?;
        if let Some(token_ids) = token_ids {
            check_num_ids(num_unknown, token_ids)?;
        }
        if self.copies.len() > 0 {
            for (&row, &n) in rows.iter().zip(ns) {
                self.check_no_untaken_copy(row, n)?;
            }
        }
        Ok(())
    }
}

/// The table is pointed at the block that holds the same already, and its own goes back.
pub(crate) fn collapse(
    pool: &mut Pool,
    sequence: &mut Sequence,
    table: &mut BlockTable,
    logical: usize,
    same: BlockId,
) {
    let block = table[logical];
    pool.attach(same);
    table.replace(sequence, logical, same);
    pool.drop_ref(block);
}

fn check_num_ids(wanted: u64, token_ids: &[TokenId]) -> Result<()> {
    if wanted == token_ids.len() as u64 {
        return Ok(());
    }
    let wanted = format!("{wanted} ids, one for each position not known yet");
    Err(Error::argument("token_ids", wanted, format!("{} ids", token_ids.len())))
}

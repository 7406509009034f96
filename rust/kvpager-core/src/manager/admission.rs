//! Admission: a prompt comes in, finds what is cached of it, and gets its blocks and slots, in one step or not at all.
//!
//! Matching walks the index from the root of the prompt's namespace, full block by full block, and stops so that at
//! least the last token is left to compute. The demand is settled before anything changes: new blocks and the watermark
//! against the blocks that are free or cached, without those that are hit. Hits are attached before any block is taken,
//! so none of them can be the victim of the same call.
//!
//! Costs: O(tokens given + slots returned). Nothing is allocated once warm, media items aside.

use super::BlockManager;
use super::append::reserve_slots;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SequenceId, Slot};
use crate::index::{Content, NO_KEY};
use crate::info::BlockState;
use crate::prompt::{Item, Prompt, check_items, check_token_ids, overlapping};

/// What an admission may take, and what it counts as. The default: slots for all that remains, nothing kept back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmitOptions {
    /// Slots to reserve, at most; `None`: for all tokens that remain to be computed.
    pub num_new_tokens: Option<u64>,
    /// Blocks that must be left to hand out afterwards. Of this and the manager's watermark the larger one is kept
    /// back. It holds even where the watermark is waived: the caller knows who will take these blocks, and sequences
    /// admitted without a slot are nobody whom the pool could see.
    pub reserve_blocks: u64,
    /// The sequence was here before (it was preempted): what it finds is not counted as a hit, and does not protect it
    /// from eviction.
    pub resumed: bool,
}

/// What an admission did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Leading tokens that were found computed: a multiple of the block size.
    pub num_computed_tokens: u64,
    /// Tokens behind them that get a slot.
    pub num_slots: u64,
}

impl BlockManager {
    /// Makes a sequence from a prompt: attaches the longest cached prefix and appends the next tokens, whose slots are
    /// added to `slots`. One step or not at all: a refusal changes nothing, not the order of eviction and no counter.
    /// O(tokens + slots).
    ///
    /// The ids of the whole prompt are kept: later chunks need only counts. Blocks are kept back for running sequences:
    /// the watermark, unless no block is live, or [`AdmitOptions::reserve_blocks`], whichever is more.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad id, token id or item; [`Error::DuplicateSequence`]; [`Error::SequenceTooLong`] if
    /// the prompt is longer than a sequence may be or the pool could ever hold; [`Error::OutOfBlocks`] with the new
    /// blocks and those kept back.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?.with_prefix_caching(true))?;
    /// let mut slots = Vec::new();
    /// let prompt = Prompt::new(&[1, 2, 3, 4, 5, 6]);
    /// assert_eq!(manager.admit(1, &prompt, &AdmitOptions::default(), &mut slots)?.num_computed_tokens, 0);
    /// assert_eq!(slots, [0, 1, 2, 3, 4, 5]);
    /// manager.commit(1, 6, None)?; // written: the first block can be found now
    ///
    /// slots.clear();
    /// assert_eq!(manager.admit(2, &prompt, &AdmitOptions::default(), &mut slots)?.num_computed_tokens, 4);
    /// assert_eq!(slots, [8, 9]); // two tokens are left to compute
    /// assert_eq!(manager.block_table(2)?, [0, 2]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn admit(
        &mut self,
        sequence_id: SequenceId,
        prompt: &Prompt<'_>,
        options: &AdmitOptions,
        slots: &mut Vec<Slot>,
    ) -> Result<Admission> {
        let admission = self.settle_admission(sequence_id, prompt, options)?;
        let Admission { num_computed_tokens, num_slots } = admission;
        reserve_slots(slots, num_slots, "token_ids")?;
        let place = self.sequences.insert(sequence_id);
        let Self { config, pool, sequences, matching, .. } = self;
        let namespace = if config.prefix_caching() {
            pool.index_mut().acquire_namespace(prompt.salt, prompt.adapter)
        } else {
            NO_KEY
        };
        for &block in &matching.blocks {
            pool.attach(block);
        }
        if !options.resumed {
            for &block in &matching.blocks {
                pool.hit(block);
            }
        }
        sequences.start(place, prompt, &matching.blocks, config.block_size(), namespace);
        pool.look_at_victims(config.blocks_for(num_slots));
        self.writer().append(place, num_slots, slots);
        if self.config.prefix_caching() {
            self.hits.count(prompt.token_ids.len() as u64, num_computed_tokens, options.resumed);
        }
        Ok(admission)
    }

    /// Whether [`admit`](Self::admit) would succeed with these arguments now. Changes nothing. O(tokens).
    ///
    /// # Errors
    /// Those of [`admit`](Self::admit), but for [`Error::OutOfBlocks`], which is the answer `false`.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// let (prompt, all) = (Prompt::new(&[1, 2, 3, 4, 5]), AdmitOptions::default());
    /// assert!(manager.can_admit(1, &prompt, &all)?);
    /// assert!(!manager.can_admit(1, &prompt, &AdmitOptions { reserve_blocks: 1, ..all })?);
    /// manager.allocate_block()?;
    /// assert!(!manager.can_admit(1, &prompt, &all)?);
    /// assert!(manager.can_admit(1, &prompt, &AdmitOptions { num_new_tokens: Some(4), ..all })?);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn can_admit(
        &mut self,
        sequence_id: SequenceId,
        prompt: &Prompt<'_>,
        options: &AdmitOptions,
    ) -> Result<bool> {
        match self.settle_admission(sequence_id, prompt, options) {
            Ok(_) => Ok(true),
            Err(Error::OutOfBlocks { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// How many leading tokens of a prompt an admission would find computed. Changes nothing, counts nothing.
    /// O(tokens compared).
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad token id or item.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.admit(1, &Prompt::new(&[1, 2, 3, 4]), &AdmitOptions::default(), &mut Vec::new())?;
    /// manager.commit(1, 4, None)?;
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3, 4]))?, 2); // one token is left to compute
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3, 4, 5]))?, 4);
    /// let salted = Prompt { salt: Some("tenant"), ..Prompt::new(&[1, 2, 3, 4, 5]) };
    /// assert_eq!(manager.match_prefix(&salted)?, 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn match_prefix(&mut self, prompt: &Prompt<'_>) -> Result<u64> {
        self.check_and_find(prompt, prompt.token_ids.len().saturating_sub(1))?;
        Ok(self.matching.blocks.len() as u64 * self.config.block_size())
    }

    /// Checks the values of a prompt by themselves, and finds the blocks of its full blocks within its first `limit`
    /// tokens, into `matching.blocks`. What is found has the ids of an indexed block, which are sound: only those
    /// behind it are checked, so that most of a prompt is read from memory once.
    pub(super) fn check_and_find(&mut self, prompt: &Prompt<'_>, limit: usize) -> Result<()> {
        if !prompt.items.is_empty() {
            check_token_ids(prompt.token_ids, "token_ids")?;
            check_items(prompt)?;
        }
        self.find_prefix(prompt, limit);
        let num_found = self.matching.blocks.len() * self.config.block_size() as usize;
        check_token_ids(&prompt.token_ids[num_found..], "token_ids")
    }

    /// The second half of [`check_and_find`](Self::check_and_find).
    fn find_prefix(&mut self, prompt: &Prompt<'_>, limit: usize) {
        let blocks = &mut self.matching.blocks;
        blocks.clear();
        if !self.config.prefix_caching() {
            return;
        }
        let index = self.pool.index_mut();
        let Some(namespace) = index.find_namespace(prompt.salt, prompt.adapter) else { return };
        let mut parent = index.root(namespace);
        let block_size = self.config.block_size();
        let mut start = 0;
        for token_ids in prompt.token_ids[..limit].chunks_exact(block_size as usize) {
            let (mut key_id, mut key_hash) = (NO_KEY, [0, 0]);
            if !prompt.items.is_empty() {
                let span = |item: &Item<'_>| (item.start, item.stop);
                let items = overlapping(prompt.items, span, start, start + block_size);
                let Some(found) = index.find_key(items.iter().copied(), start) else { return };
                (key_id, key_hash) = found;
            }
            let hash = index.chain(&parent, token_ids, key_hash);
            let Ok(block) = index.find(&Content { parent, hash, token_ids, key_id }) else { return };
            blocks.push(block);
            parent = index.parent(block);
            start += block_size;
        }
    }

    /// What [`admit`](Self::admit) would answer with these arguments now, or why not. Changes nothing.
    fn settle_admission(
        &mut self,
        sequence_id: SequenceId,
        prompt: &Prompt<'_>,
        options: &AdmitOptions,
    ) -> Result<Admission> {
        Self::check_id(sequence_id, "sequence_id")?;
        self.check_and_find(prompt, prompt.token_ids.len().saturating_sub(1))?;
        self.check_new(sequence_id)?;
        let num_tokens = prompt.token_ids.len() as u64;
        self.check_length(num_tokens)?;
        let num_all = self.config.blocks_for(num_tokens);
        if num_all > u64::from(self.config.num_blocks()) {
            let (block_size, total) = (self.config.block_size(), self.config.num_blocks());
            let reason = format!(
                "{num_tokens} tokens need {num_all} blocks of {block_size} tokens, the pool has {total}"
            );
            return Err(Error::SequenceTooLong { reason });
        }

        let hits = &self.matching.blocks;
        let num_computed_tokens = hits.len() as u64 * self.config.block_size();
        let num_slots = (num_tokens - num_computed_tokens).min(options.num_new_tokens.unwrap_or(u64::MAX));
        let num_new_blocks = self.config.blocks_for(num_computed_tokens + num_slots) - hits.len() as u64;
        // While nothing is live nothing runs that could grow into the watermark, and waiting would be for ever.
        let watermark = if self.pool.num_live() == 0 { 0 } else { u64::from(self.config.watermark_blocks()) };
        let watermark = watermark.max(options.reserve_blocks);
        let num_available = u64::from(self.pool.num_available());
        // Most of the time there is enough even if all hits were cached.
        let needed = num_new_blocks.saturating_add(watermark);
        if needed.saturating_add(hits.len() as u64) > num_available {
            let is_cached = |&&block: &&BlockId| self.pool.state(block) == BlockState::Cached;
            let free = num_available - hits.iter().filter(is_cached).count() as u64;
            if needed > free {
                let (fenced, total) = (u64::from(self.pool.num_fenced()), u64::from(self.pool.num_blocks()));
                return Err(Error::OutOfBlocks { needed, free, fenced, total, row: None, watermark });
            }
        }
        Ok(Admission { num_computed_tokens, num_slots })
    }

    fn check_length(&self, num_tokens: u64) -> Result<()> {
        let most = self.config.max_sequence_length();
        if num_tokens <= most {
            return Ok(());
        }
        Err(Error::SequenceTooLong {
            reason: format!("{num_tokens} tokens, `max_sequence_length` is {most}"),
        })
    }
}

//! Admission: a prompt comes in, finds what is cached of it, and gets its blocks and slots, in one step or not at all.
//!
//! Matching walks the index from the root of the prompt's namespace, full block by full block, and stops so that at
//! least the last token is left to compute. The demand is settled before anything changes: new blocks and the watermark
//! against the blocks that are free or cached, without those that are hit. Hits are attached before any block is taken,
//! so none of them can be the victim of the same call.
//!
//! Costs: O(tokens given + slots returned). Nothing is allocated once warm, media items aside.

use crate::append::{append_run, reserve_slots};
use crate::chain::Chain;
use crate::config::MAX_TOKEN_ID;
use crate::hash::Hash;
use crate::index::Parent;
use crate::keys::{NO_KEY, encode_items, encode_namespace};
use crate::manager::BlockManager;
use crate::pool::FENCED;
use crate::sequence::SequenceTable;
use crate::{BlockId, Error, Result, SequenceId, Slot, TokenId};

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

/// Memory of one admission, kept between calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Matching {
    /// The blocks found, logical block 0 first.
    pub(crate) blocks: Vec<BlockId>,
    /// Encoded keys.
    pub(crate) bytes: Vec<u8>,
    /// Hashes of blocks that are about to be looked up.
    pub(crate) ahead: Vec<Hash>,
}

/// What an admission may take, and what it counts as. The default: slots for all that remains, nothing kept back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmitOptions {
    /// Slots to reserve, at most; `None`: for all tokens that remain to be computed.
    pub num_new_tokens: Option<u64>,
    /// Blocks that must be left to hand out afterwards. Of this and the manager's watermark the larger one is kept back.
    /// It holds even where the watermark is waived: the caller knows who will take these blocks, and sequences admitted
    /// without a slot are nobody whom the pool could see.
    pub reserve_blocks: u64,
    /// The sequence was here before (it was preempted): what it finds is not counted as a hit, and does not protect it
    /// from eviction.
    pub resumed: bool,
}

/// What an admission does, or would do.
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
    /// manager.commit(1, 6)?; // written: the first block can be found now
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
        let plan = self.settle_admission(sequence_id, prompt, options)?;
        let Admission { num_computed_tokens, num_slots } = plan;
        reserve_slots(slots, num_slots, "token_ids")?;
        let row = self.sequences.insert(sequence_id) as usize;
        let Self { config, pool, copies, sequences, matching, .. } = self;
        let SequenceTable { rows, tables, chains, spare, .. } = sequences;
        let namespace = if config.prefix_caching() {
            encode_namespace(prompt.salt, prompt.adapter, &mut matching.bytes);
            pool.index.acquire_namespace(&matching.bytes)
        } else {
            NO_KEY
        };
        let tokens = (prompt.token_ids, matching.blocks.len());
        chains[row].start(tokens, (prompt.items, config.block_size()), namespace, spare);
        for &block in &matching.blocks {
            pool.attach(block);
        }
        if !options.resumed {
            for &block in &matching.blocks {
                pool.cached.hit(block);
            }
        }
        let (sequence, table) = (&mut rows[row], &mut tables[row]);
        table.extend_from_slice(sequence, &matching.blocks);
        sequence.length = num_computed_tokens;
        sequence.computed = num_computed_tokens;
        sequence.close_run();
        pool.look_at_victims(config.blocks_for(num_slots));
        append_run(config, pool, copies, (sequence, table), num_slots, slots);
        if config.prefix_caching() {
            if options.resumed {
                self.hits.resumed += num_computed_tokens;
            } else {
                self.hits.queried += prompt.token_ids.len() as u64;
                self.hits.found += num_computed_tokens;
            }
        }
        Ok(plan)
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
    /// manager.commit(1, 4)?;
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
    /// tokens, into `matching.blocks`. What is found has the ids of an indexed block, which are sound: only those behind
    /// it are checked, so that most of a prompt is read from memory once.
    pub(crate) fn check_and_find(&mut self, prompt: &Prompt<'_>, limit: usize) -> Result<()> {
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
        let Self { config, pool, matching: Matching { blocks, bytes, .. }, .. } = self;
        blocks.clear();
        if !config.prefix_caching() {
            return;
        }
        let index = &pool.index;
        encode_namespace(prompt.salt, prompt.adapter, bytes);
        let Some(namespace) = index.find_namespace(bytes) else { return };
        let mut parent: Parent = index.root(namespace);
        let block_size = config.block_size() as usize;
        for token_ids in prompt.token_ids[..limit].chunks_exact(block_size) {
            let (mut key, mut key_hash) = (NO_KEY, [0, 0]);
            if !prompt.items.is_empty() {
                encode_items(prompt.items, (blocks.len() * block_size) as u64, block_size as u64, bytes);
                let Some(found) = index.find_key(bytes) else { return };
                (key, key_hash) = found;
            }
            let hash = index.chain(&parent, token_ids, key_hash);
            let Ok(block) = index.find(&parent, hash, token_ids, key) else { return };
            blocks.push(block);
            parent = index.parent(block);
        }
    }

    /// What [`admit`](Self::admit) would answer with these arguments now, or why not. Changes nothing. O(tokens).
    ///
    /// # Errors
    /// Those of [`admit`](Self::admit).
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// let planned = manager.settle_admission(1, &Prompt::new(&[1, 2, 3, 4, 5]), &AdmitOptions::default())?;
    /// assert_eq!(planned.num_slots, 5);
    /// assert_eq!(manager.num_sequences(), 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn settle_admission(
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
        let watermark = if self.pool.live == 0 { 0 } else { u64::from(self.config.watermark_blocks()) };
        let watermark = watermark.max(options.reserve_blocks);
        let pool = &self.pool;
        let is_cached = |&&block: &&BlockId| pool.ref_count(block) == 0 && !pool.has(block, FENCED);
        let num_available = u64::from(pool.num_available());
        // Most of the time there is enough even if all hits were cached.
        let needed = num_new_blocks.saturating_add(watermark);
        if needed.saturating_add(hits.len() as u64) > num_available {
            let free = num_available - hits.iter().filter(is_cached).count() as u64;
            if needed > free {
                let (fenced, total) = (u64::from(pool.num_fenced()), u64::from(pool.num_blocks()));
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

/// The extra keys of a sequence's block, encoded into `bytes`.
pub(crate) fn encode_kept_items(chain: &Chain, block: usize, block_size: u64, bytes: &mut Vec<u8>) {
    bytes.clear();
    if let Some(kept) = &chain.items {
        let start = block as u64 * block_size;
        let first = kept.partition_point(|item| item.stop <= start);
        let overlapping = kept[first..].iter().take_while(|item| item.start < start + block_size);
        for item in overlapping {
            crate::keys::encode_item(
                &Item { start: item.start, stop: item.stop, key: &item.key },
                start,
                bytes,
            );
        }
    }
}

fn check_items(prompt: &Prompt<'_>) -> Result<()> {
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

//! Fences: a block that work in flight may still touch is not handed out.
//!
//! A block without a holder is *fenced* while an untaken copy reads it, with or without fences. With `fences` it also
//! waits for its epoch: the one in which it reached ref 0, or in which the last copy out of it was taken. It keeps its
//! node in the index, and a hit makes it live again.
//!
//! Invariants: the list holds exactly the fenced blocks in the order in which they reached ref 0, so the epochs along
//! it never fall, copy sources marked `TAKEN` aside; they leave it in that order.
//!
//! Costs: fencing is O(1), retiring O(blocks freed in the epoch + copy sources that wait). Epochs are kept as 32 bits,
//! compared by distance: 4 bytes a block, and only with fences.

use crate::direct::close_direct;
use crate::links::List;
use crate::pool::{FENCED, Pool, TAKEN};
use crate::sequence::SequenceTable;
use crate::{BlockId, BlockManager, Config, Error, Result};

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct Fences {
    pub(crate) are_on: bool,
    pub(crate) list: List,
    /// The epoch that is open.
    pub(crate) current: u64,
    /// Epochs below are retired.
    pub(crate) first_open: u64,
    /// Of each fenced block: the low bits of its epoch. Empty without fences.
    epochs: Vec<u32>,
}

impl Fences {
    pub(crate) fn new(config: &Config) -> Self {
        let num_epochs = if config.fences() { config.num_blocks() as usize } else { 0 };
        Self {
            are_on: config.fences(),
            list: List::new(),
            current: 0,
            first_open: 0,
            epochs: vec![0; num_epochs],
        }
    }

    pub(crate) fn bytes_per_block(config: &Config) -> usize {
        if config.fences() { size_of::<u32>() } else { 0 }
    }

    /// Whether the epoch of a fenced block is retired.
    pub(crate) fn is_retired(&self, block: BlockId) -> bool {
        if !self.are_on {
            return true;
        }
        u64::from(self.age(block)) > self.current - self.first_open
    }

    /// Epochs since that of a fenced block; 0 without fences.
    pub(crate) fn age(&self, block: BlockId) -> u32 {
        let epoch = self.epochs.get(block as usize).copied().unwrap_or(self.current as u32);
        (self.current as u32).wrapping_sub(epoch)
    }
}

impl Pool {
    /// `block` has reached ref 0, but may still be touched.
    #[cold]
    pub(crate) fn fence(&mut self, block: BlockId) {
        self.flags[block as usize] |= FENCED;
        if self.fences.are_on {
            self.fences.epochs[block as usize] = self.fences.current as u32;
        }
        self.fences.list.push_back(&mut self.links, block);
    }

    fn unfence(&mut self, block: BlockId) {
        self.fences.list.remove(&mut self.links, block);
        self.flags[block as usize] &= !(FENCED | TAKEN);
        self.let_go(block);
    }

    /// An untaken copy reads `block`: it must not be handed out meanwhile.
    pub(crate) fn pin(&mut self, block: BlockId) {
        self.pins[block as usize] += 1;
    }

    /// One untaken copy out of `block` was dropped; the last one gone, its epoch alone decides.
    pub(crate) fn unpin(&mut self, block: BlockId) {
        self.pins[block as usize] -= 1;
        if self.pins[block as usize] == 0 && self.has(block, FENCED) && self.fences.is_retired(block) {
            self.unfence(block);
        }
    }

    /// The copy out of `source` was taken and runs now.
    pub(crate) fn source_taken(&mut self, source: BlockId) {
        self.pins[source as usize] = 0;
        if self.fences.are_on && self.has(source, FENCED) {
            self.fences.epochs[source as usize] = self.fences.current as u32;
            self.flags[source as usize] |= TAKEN;
        }
    }

    /// Lets go of every fenced block that nothing touches any more, in the order in which they reached ref 0.
    pub(crate) fn release_fenced(&mut self) {
        let mut at = self.fences.list.first();
        while let Some(block) = at {
            at = List::after(&self.links, block);
            if self.fences.is_retired(block) {
                if self.pins[block as usize] == 0 {
                    self.unfence(block);
                }
            } else if !self.has(block, TAKEN) {
                break; // and so are all that come later
            }
        }
    }
}

impl BlockManager {
    /// Closes the current epoch and returns its number; the first one is 0. O(1).
    ///
    /// With fences, what is freed from now on belongs to the next epoch. Called after the work of a step was handed to
    /// a device; see [`retire`](Self::retire).
    ///
    /// # Errors
    /// [`Error::State`] if 2³² − 1 epochs wait to be retired.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?.with_fences(true))?;
    /// assert_eq!(manager.advance_epoch()?, 0);
    /// assert_eq!(manager.advance_epoch()?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn advance_epoch(&mut self) -> Result<u64> {
        let fences = &mut self.pool.fences;
        if fences.are_on && fences.current - fences.first_open >= u64::from(u32::MAX) - 1 {
            let reason = format!("{} epochs wait to be retired, no more can be told apart", u32::MAX);
            return Err(Error::State { reason });
        }
        fences.current += 1;
        Ok(fences.current - 1)
    }

    /// Says that all work of `epoch` and of those before it is done: blocks freed in them become cached or free, in the
    /// order in which they reached ref 0. An epoch that is retired already changes nothing. O(blocks freed in them).
    ///
    /// # Errors
    /// [`Error::Argument`] unless `epoch` is closed.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?.with_fences(true))?;
    /// let block = manager.allocate_block()?;
    /// manager.free_block(block)?;
    /// assert_eq!(manager.stats().fenced, 1); // a kernel may still write it
    /// let epoch = manager.advance_epoch()?;
    /// manager.retire(epoch)?;
    /// assert_eq!(manager.stats().free, 4);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn retire(&mut self, epoch: u64) -> Result<()> {
        let fences = &mut self.pool.fences;
        if epoch >= fences.current {
            let wanted = match fences.current {
                0 => "a closed epoch, none is closed yet".to_owned(),
                current => format!("a closed epoch, 0 to {}", current - 1),
            };
            return Err(Error::argument("epoch", wanted, epoch));
        }
        if epoch >= fences.first_open {
            fences.first_open = epoch + 1;
            if fences.are_on {
                self.pool.release_fenced();
            }
        }
        Ok(())
    }

    /// Forgets every cached prefix: cached blocks become free in the order in which they would have been evicted, live
    /// and fenced ones lose their place in the index. For new weights: sequences that have tokens by now index nothing
    /// more until they are cut back to none, and neither do their forks. O(blocks used so far).
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(4, 2)?.with_prefix_caching(true))?;
    /// let prompt = Prompt::new(&[1, 2, 3, 4]);
    /// manager.admit(1, &prompt, &AdmitOptions::default(), &mut Vec::new())?;
    /// manager.commit(1, 4)?;
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3, 4, 5]))?, 4);
    /// manager.reset_prefix_cache();
    /// assert_eq!(manager.match_prefix(&Prompt::new(&[1, 2, 3, 4, 5]))?, 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn reset_prefix_cache(&mut self) {
        if !self.config.prefix_caching() {
            return;
        }
        self.pool.unindex_all();
        let SequenceTable { rows, tables, chains, .. } = &mut self.sequences;
        for ((sequence, table), chain) in rows.iter_mut().zip(tables).zip(chains) {
            close_direct(sequence, table, chain, &self.pool.index);
            chain.num_indexed = 0;
            chain.is_stale |= sequence.length > 0;
        }
    }
}

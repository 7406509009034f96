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

use super::{FENCED, Pool, TAKEN};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::links::List;

/// See the module header.
#[derive(Clone, Debug)]
pub(super) struct Fences {
    are_on: bool,
    pub(super) list: List,
    /// The epoch that is open.
    pub(super) current: u64,
    /// Epochs below are retired.
    pub(super) first_open: u64,
    /// Of each fenced block: the low bits of its epoch. Empty without fences.
    epochs: Vec<u32>,
}

impl Fences {
    pub(super) fn new(config: &Config) -> Self {
        let num_epochs = if config.fences() { config.num_blocks() as usize } else { 0 };
        Self {
            are_on: config.fences(),
            list: List::new(),
            current: 0,
            first_open: 0,
            epochs: vec![0; num_epochs],
        }
    }

    #[inline]
    pub(super) fn are_on(&self) -> bool {
        self.are_on
    }

    pub(super) fn len(&self) -> u32 {
        self.list.len()
    }

    pub(super) fn bytes_per_block(config: &Config) -> usize {
        if config.fences() { size_of::<u32>() } else { 0 }
    }

    /// Whether the epoch of a fenced block is retired.
    pub(super) fn is_retired(&self, block: BlockId) -> bool {
        if !self.are_on {
            return true;
        }
        u64::from(self.age(block)) > self.current - self.first_open
    }

    /// Epochs since that of a fenced block; 0 without fences.
    pub(super) fn age(&self, block: BlockId) -> u32 {
        let epoch = self.epochs.get(block as usize).copied().unwrap_or(self.current as u32);
        (self.current as u32).wrapping_sub(epoch)
    }
}

impl Pool {
    /// `block` has reached ref 0, but may still be touched.
    #[cold]
    pub(super) fn fence(&mut self, block: BlockId) {
        self.flags[block as usize] |= FENCED;
        if self.fences.are_on {
            self.fences.epochs[block as usize] = self.fences.current as u32;
        }
        self.fences.list.push_back(&mut self.links, block);
    }

    /// A fenced `block` is fenced no more.
    pub(super) fn leave_fence(&mut self, block: BlockId) {
        self.fences.list.remove(&mut self.links, block);
        self.flags[block as usize] &= !(FENCED | TAKEN);
    }

    fn unfence(&mut self, block: BlockId) {
        self.leave_fence(block);
        self.let_go(block);
    }

    /// An untaken copy reads `block`: it must not be handed out meanwhile.
    pub(crate) fn add_reader(&mut self, block: BlockId) {
        self.num_readers[block as usize] += 1;
    }

    /// One untaken copy out of `block` was dropped; the last one gone, its epoch alone decides.
    pub(crate) fn drop_reader(&mut self, block: BlockId) {
        self.num_readers[block as usize] -= 1;
        if self.num_readers[block as usize] == 0 && self.has(block, FENCED) && self.fences.is_retired(block) {
            self.unfence(block);
        }
    }

    /// The copy out of `source` was taken and runs now.
    pub(crate) fn source_taken(&mut self, source: BlockId) {
        self.num_readers[source as usize] = 0;
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
                if self.num_readers[block as usize] == 0 {
                    self.unfence(block);
                }
            } else if !self.has(block, TAKEN) {
                break; // and so are all that come later
            }
        }
    }

    /// Closes the epoch that is open; its number.
    pub(crate) fn advance_epoch(&mut self) -> Result<u64> {
        let fences = &mut self.fences;
        if fences.are_on && fences.current - fences.first_open >= u64::from(u32::MAX) - 1 {
            let reason = format!("{} epochs wait to be retired, no more can be told apart", u32::MAX);
            return Err(Error::State { reason });
        }
        fences.current += 1;
        Ok(fences.current - 1)
    }

    /// All work up to `epoch` is done.
    pub(crate) fn retire(&mut self, epoch: u64) -> Result<()> {
        let fences = &mut self.fences;
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
                self.release_fenced();
            }
        }
        Ok(())
    }
}

//! Pinning: a caller holds a cached prefix (a system prompt, a shared document) so that it is not evicted.
//!
//! A pin counts as a holder of each of its blocks: ref ≥ 1, live. The quota bounds the distinct pinned blocks.
//!
//! Costs: O(tokens compared + blocks) to pin, O(blocks) to unpin.

use super::BlockManager;
use crate::error::{Error, Result};
use crate::pins::PinId;
use crate::prompt::Prompt;

impl BlockManager {
    /// Holds the cached full blocks of a prompt until [`unpin`](Self::unpin); they may be none. Returns the pin's id.
    /// O(tokens compared + blocks).
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad token id or item; [`Error::State`] if it would exceed the quota.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.admit(1, &Prompt::new(&[1, 2, 3, 4]), &AdmitOptions::default(), &mut Vec::new())?;
    /// manager.commit(1, 4, None)?;
    /// let pin = manager.pin_prefix(&Prompt::new(&[1, 2, 3, 4]))?;
    /// manager.release_sequence(1)?;
    /// assert_eq!((manager.stats().live, manager.stats().pinned), (2, 2));
    /// manager.unpin(pin)?;
    /// assert_eq!(manager.stats().cached, 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn pin_prefix(&mut self, prompt: &Prompt<'_>) -> Result<PinId> {
        self.check_and_find(prompt, prompt.token_ids.len())?;
        let blocks = &self.matching.blocks;
        let num_new = blocks.iter().filter(|&&block| self.pins.on(block) == 0).count();
        let (num_pinned, quota) = (self.pins.num_blocks(), self.config.max_pinned_blocks());
        if num_pinned + num_new > quota as usize {
            let reason = format!(
                "pinning {num_new} more blocks exceeds `max_pinned_blocks`: {num_pinned} of {quota} are pinned"
            );
            return Err(Error::State { reason });
        }
        for &block in blocks {
            self.pool.attach(block);
        }
        Ok(self.pins.add(blocks))
    }

    /// Lets go of a pin's blocks, last first. O(blocks).
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such pin, or no more.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// let pin = manager.pin_prefix(&Prompt::new(&[1, 2]))?; // nothing is cached: it holds nothing
    /// manager.unpin(pin)?;
    /// assert!(manager.unpin(pin).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        let Some(blocks) = self.pins.remove(pin) else {
            return Err(Error::argument("pin", "the id of a pin that is held", pin));
        };
        for &block in blocks.iter().rev() {
            self.pool.drop_ref(block);
        }
        Ok(())
    }
}

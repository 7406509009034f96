//! Epochs and resets: when what was let go may be handed out again, and when what is cached is void.

use super::BlockManager;
use crate::error::Result;

impl BlockManager {
    /// Closes the current epoch and returns its number; the first one is 0. O(1).
    ///
    /// With fences, what is freed from now on belongs to the next epoch. Called after the work of a step was handed to
    /// a device; see [`retire`](Self::retire).
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if 2³² − 1 epochs wait to be retired.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?.with_fences(true))?;
    /// assert_eq!(manager.advance_epoch()?, 0);
    /// assert_eq!(manager.advance_epoch()?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn advance_epoch(&mut self) -> Result<u64> {
        self.pool.advance_epoch()
    }

    /// Says that all work of `epoch` and of those before it is done: blocks freed in them become cached or free, in the
    /// order in which they reached ref 0. An epoch that is retired already changes nothing. O(blocks freed in them).
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) unless `epoch` is closed.
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
        self.pool.retire(epoch)
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
    /// manager.commit(1, 4, None)?;
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
        self.sequences.forget_index();
    }
}

//! The batches of a manager: how they come and go, and one of them in hand.

use super::BlockManager;
use crate::batch::{BatchBuffers, BatchId, BatchShape};
use crate::error::Result;
use crate::ids::SequenceId;

/// A batch of a manager: how its rows come and go, and its steps.
#[derive(Debug)]
pub struct BatchMut<'a> {
    pub(super) manager: &'a mut BlockManager,
    pub(super) id: BatchId,
}

impl BlockManager {
    /// Makes a batch without rows over two sets of buffers, and writes "no rows" into both. O(sets).
    ///
    /// The same two sets, in the same order, are lent again to each [`step`](BatchMut::step).
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if a buffer has another size than `shape` says, or a size does not
    /// fit an int32.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// assert_eq!(memory[1].block_tables, [-1; 6]);
    /// assert_eq!(manager.batch(batch)?.sequence_ids()?.len(), 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn create_batch(&mut self, shape: BatchShape, sets: &mut [BatchBuffers<'_>; 2]) -> Result<BatchId> {
        self.batches.create(shape, sets)
    }

    /// Forgets a batch; its sequences are rows of none from then on. O(rows).
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.batch(batch)?.add(7)?;
    /// manager.drop_batch(batch)?;
    /// manager.release_sequence(7)?;
    /// assert!(manager.drop_batch(batch).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn drop_batch(&mut self, batch: BatchId) -> Result<()> {
        self.batches.drop(batch)
    }

    /// The batch of this name, to step it and to change its rows. O(batches).
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// assert!(manager.batch(batch).is_ok());
    /// manager.drop_batch(batch)?;
    /// assert!(manager.batch(batch).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[inline]
    pub fn batch(&mut self, batch: BatchId) -> Result<BatchMut<'_>> {
        self.batches.get(batch)?;
        Ok(BatchMut { manager: self, id: batch })
    }
}

impl BatchMut<'_> {
    /// Makes a sequence the last row of a batch; returns which row that is. The next step shows it. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::Error::UnknownSequence); [`Error::State`](crate::Error::State) if it is a row
    /// of a batch already or the batch is full; [`Error::SequenceTooLong`](crate::Error::SequenceTooLong) if the
    /// buffers have no room for its table.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// assert_eq!(manager.batch(batch)?.add(7)?, 0);
    /// let refused = manager.batch(batch)?.add(7).unwrap_err();
    /// assert_eq!(refused.to_string(), "sequence 7 is row 0 of a batch already");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn add(&mut self, sequence_id: SequenceId) -> Result<usize> {
        let BlockManager { batches, sequences, config, .. } = &mut *self.manager;
        let place = sequences.find(sequence_id)?;
        batches.add(self.id, place, sequences, config.block_size())
    }

    /// Takes a sequence out of a batch; the last row moves into the hole. Returns the row that it had, and the sequence
    /// that has it now: `None` if it was the last. O(1); the next step writes the row that moved.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::Error::UnknownSequence); [`Error::State`](crate::Error::State) if it is no row
    /// of this batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// for id in [7, 8] {
    ///     manager.create_sequence(id)?;
    ///     manager.batch(batch)?.add(id)?;
    /// }
    /// assert_eq!(manager.batch(batch)?.remove(7)?, (0, Some(8)));
    /// assert_eq!(manager.batch(batch)?.remove(8)?, (0, None));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn remove(&mut self, sequence_id: SequenceId) -> Result<(usize, Option<SequenceId>)> {
        let BlockManager { batches, sequences, .. } = &mut *self.manager;
        let place = sequences.find(sequence_id)?;
        let (row, moved) = batches.remove(self.id, place, sequences)?;
        Ok((row, moved.map(|place| sequences.id(place))))
    }

    /// Says that what the sets and the device's table show is unknown, as somebody wrote over them. Each set is written
    /// in full at its next turn, every row counts as new, and the next step says to upload the table. O(rows).
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// memory[0].block_tables.fill(77);
    /// manager.batch(batch)?.invalidate()?;
    /// let step = manager.batch(batch)?.step(&mut memory.each_mut().map(BatchMemory::lend), None, None)?;
    /// assert!(step.upload_table);
    /// assert_eq!(memory[0].block_tables, [-1; 6]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn invalidate(&mut self) -> Result<()> {
        let BlockManager { batches, sequences, .. } = &mut *self.manager;
        batches.get_mut(self.id)?.invalidate(sequences);
        Ok(())
    }

    /// The sequences of a batch, by row; their number is that of the rows in use. O(rows).
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.batch(batch)?.add(7)?;
    /// assert!(manager.batch(batch)?.sequence_ids()?.eq([7]));
    /// assert_eq!(manager.batch(batch)?.sequence_ids()?.len(), 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn sequence_ids(&self) -> Result<impl ExactSizeIterator<Item = SequenceId>> {
        let BlockManager { batches, sequences, .. } = &*self.manager;
        Ok(batches.get(self.id)?.rows().iter().map(|&place| sequences.id(place)))
    }
}

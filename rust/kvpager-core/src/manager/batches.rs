//! The batches of a manager: how they and their rows come and go.

use super::BlockManager;
use crate::batch::{BatchBuffers, BatchId, BatchShape};
use crate::error::Result;
use crate::ids::SequenceId;

impl BlockManager {
    /// Makes a batch without rows over two sets of buffers, and writes "no rows" into both. O(sets).
    ///
    /// The same two sets, in the same order, are lent again to each [`step`](Self::step_batch).
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if a buffer has another size than `shape` says, or a size does not fit an int32.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// assert_eq!(memory[1].block_tables, [-1; 6]);
    /// assert_eq!(manager.batch_sequence_ids(batch)?.len(), 0);
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
    /// manager.add_to_batch(batch, 7)?;
    /// manager.drop_batch(batch)?;
    /// manager.release_sequence(7)?;
    /// assert!(manager.drop_batch(batch).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn drop_batch(&mut self, batch: BatchId) -> Result<()> {
        self.batches.drop(batch)
    }

    /// Makes a sequence the last row of a batch; returns which row that is. The next step shows it. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::Error::UnknownSequence); [`Error::State`](crate::Error::State) if it is a row of a batch already, the batch is full, or there is
    /// no such batch; [`Error::SequenceTooLong`](crate::Error::SequenceTooLong) if the buffers have no room for its table.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// assert_eq!(manager.add_to_batch(batch, 7)?, 0);
    /// let refused = manager.add_to_batch(batch, 7).unwrap_err();
    /// assert_eq!(refused.to_string(), "sequence 7 is row 0 of a batch already");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn add_to_batch(&mut self, batch: BatchId, sequence_id: SequenceId) -> Result<usize> {
        let block_size = self.config.block_size();
        self.batches.get(batch)?;
        let place = self.sequences.find(sequence_id)?;
        self.batches.add(batch, place, &mut self.sequences, block_size)
    }

    /// Takes a sequence out of a batch; the last row moves into the hole. Returns the row that it had, and the sequence
    /// that has it now: `None` if it was the last. O(1); the next step writes the row that moved.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::Error::UnknownSequence); [`Error::State`](crate::Error::State) if it is no row of this batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// for id in [7, 8] {
    ///     manager.create_sequence(id)?;
    ///     manager.add_to_batch(batch, id)?;
    /// }
    /// assert_eq!(manager.remove_from_batch(batch, 7)?, (0, Some(8)));
    /// assert_eq!(manager.remove_from_batch(batch, 8)?, (0, None));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn remove_from_batch(
        &mut self,
        batch: BatchId,
        sequence_id: SequenceId,
    ) -> Result<(usize, Option<SequenceId>)> {
        self.batches.get(batch)?;
        let place = self.sequences.find(sequence_id)?;
        let (row, moved) = self.batches.remove(batch, place, &mut self.sequences)?;
        Ok((row, moved.map(|place| self.sequences.id(place))))
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
    /// manager.invalidate_batch(batch)?;
    /// let step = manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), None, None)?;
    /// assert!(step.upload_table);
    /// assert_eq!(memory[0].block_tables, [-1; 6]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn invalidate_batch(&mut self, batch: BatchId) -> Result<()> {
        self.batches.get_mut(batch)?.invalidate(&mut self.sequences);
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
    /// manager.add_to_batch(batch, 7)?;
    /// assert!(manager.batch_sequence_ids(batch)?.eq([7]));
    /// assert_eq!(manager.batch_sequence_ids(batch)?.len(), 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn batch_sequence_ids(&self, batch: BatchId) -> Result<impl ExactSizeIterator<Item = SequenceId>> {
        Ok(self.batches.get(batch)?.rows().iter().map(|&place| self.sequences.id(place)))
    }
}

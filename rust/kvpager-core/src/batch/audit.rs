//! What must hold between the batches and the sequences they show.

use super::{Batch, Place};
use crate::BlockManager;
use crate::sequence::{UNCHANGED, VACANT};

impl BlockManager {
    /// Adds a line for each thing that is broken. O(rows + sequences).
    pub(crate) fn audit_batches(&self, faults: &mut Vec<String>) {
        for batch in &self.batches.all {
            self.audit_batch(batch, faults);
        }
        for (sequence_row, place) in self.batches.places.iter().enumerate() {
            let Some(Place { batch, row }) = *place else { continue };
            let shows = |candidate: &Batch| {
                candidate.id == batch && candidate.rows.get(row as usize) == Some(&(sequence_row as u32))
            };
            if !self.batches.all.iter().any(shows) {
                let id = self.sequences.ids.get(sequence_row).copied().unwrap_or(VACANT);
                faults.push(format!(
                    "sequence {id}: it has row {row} of batch {}, which does not show it",
                    batch.0
                ));
            }
        }
    }

    fn audit_batch(&self, batch: &Batch, faults: &mut Vec<String>) {
        let name = batch.id.0;
        let (num_rows, max_rows) = (batch.rows.len(), batch.shape.max_rows);
        if num_rows > max_rows || batch.is_new.len() != num_rows || batch.previous_rows > max_rows {
            faults.push(format!(
                "batch {name}: {num_rows} rows, marks of {}, room for {max_rows}",
                batch.is_new.len()
            ));
            return;
        }
        for (row, &sequence_row) in batch.rows.iter().enumerate() {
            let id = self.sequences.ids.get(sequence_row as usize).copied().unwrap_or(VACANT);
            if id == VACANT {
                faults.push(format!("batch {name}: row {row} shows no sequence"));
                continue;
            }
            let sequence = self.sequences.view(sequence_row);
            if self.batches.place(sequence_row) != Some(Place { batch: batch.id, row: row as u32 }) {
                faults.push(format!("batch {name}: row {row} shows sequence {id}, which has another place"));
            }
            let (mark, num_shown) = (sequence.changed_from(), batch.previous[row]);
            let sound = match mark {
                UNCHANGED => !batch.is_new[row] && sequence.table.len() == num_shown as usize,
                _ => mark == 0 || (!batch.is_new[row] && mark <= num_shown),
            };
            if !sound {
                faults.push(format!(
                    "batch {name}: row {row} showed {num_shown} blocks of sequence {id}, which has {} and no mark that says so",
                    sequence.table.len()
                ));
            }
        }
        batch.audit_sets(faults);
    }
}

impl Batch {
    /// A set shows what the previous step showed, but for the rows that it is said to have missed.
    fn audit_sets(&self, faults: &mut Vec<String>) {
        let name = self.id.0;
        let (next, last) = (&self.shown[self.turn], &self.shown[1 - self.turn]);
        if last.num_rows != self.previous_rows && !self.is_invalid {
            let (shows, showed) = (last.num_rows, self.previous_rows);
            faults.push(format!(
                "batch {name}: its last set shows {shows} rows, the last step showed {showed}"
            ));
        }
        if self.is_invalid {
            return; // nothing is known about the sets
        }
        for row in 0..self.previous_rows {
            let showed = self.previous[row];
            if last.num_blocks[row] != showed {
                faults.push(format!(
                    "batch {name}: row {row} of its last set shows {} blocks, the last step showed {showed}",
                    last.num_blocks[row]
                ));
            }
            let missed = self.missed.iter().find(|&&(missed, _)| missed as usize == row);
            let sound = match missed {
                None => next.num_blocks[row] == showed,
                Some(&(_, from)) => from <= next.num_blocks[row],
            };
            if !sound {
                faults.push(format!(
                    "batch {name}: row {row} of its next set shows {} blocks and does not know what it missed",
                    next.num_blocks[row]
                ));
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    //! Each kind of corruption, planted by hand, is found and named.

    use super::*;
    use crate::Config;
    use crate::batch::{BatchId, BatchMemory, BatchShape};

    /// Batch 0 shows sequences 7 and 8, one block each, and has stepped twice.
    fn sound() -> BlockManager {
        let mut manager = BlockManager::new(Config::new(8, 4).unwrap()).unwrap();
        let shape = BatchShape { max_rows: 3, max_blocks: 2, max_tokens: 3, max_changes: 3 };
        let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
        let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend)).unwrap();
        for id in [7, 8] {
            manager.create_sequence(id).unwrap();
            manager.add_to_batch(batch, id).unwrap();
        }
        for _ in 0..2 {
            manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), None, None).unwrap();
        }
        assert_eq!(manager.check_invariants(), [""; 0]);
        manager
    }

    fn assert_named(manager: &BlockManager, wanted: &str) {
        let faults = manager.check_invariants();
        assert!(faults.iter().any(|fault| fault.contains(wanted)), "wanted {wanted:?} among {faults:#?}");
    }

    #[test]
    fn a_row_without_its_place() {
        let mut manager = sound();
        manager.batches.places[0] = None;
        assert_named(&manager, "batch 0: row 0 shows sequence 7, which has another place");
    }

    #[test]
    fn a_place_without_its_row() {
        let mut manager = sound();
        manager.batches.all[0].rows.pop();
        manager.batches.all[0].is_new.pop();
        assert_named(&manager, "sequence 8: it has row 1 of batch 0, which does not show it");
        let mut manager = sound();
        manager.batches.places[1] = Some(Place { batch: BatchId(5), row: 1 });
        assert_named(&manager, "sequence 8: it has row 1 of batch 5, which does not show it");
    }

    #[test]
    fn a_row_that_shows_nothing() {
        let mut manager = sound();
        manager.batches.all[0].rows[1] = 9;
        assert_named(&manager, "batch 0: row 1 shows no sequence");
    }

    #[test]
    fn a_change_without_its_mark() {
        let mut manager = sound();
        manager.append_tokens(7, 3, &mut Vec::new()).unwrap();
        assert_eq!(manager.check_invariants(), [""; 0]);
        manager.sequences.rows[0].take_mark();
        assert_named(
            &manager,
            "batch 0: row 0 showed 1 blocks of sequence 7, which has 2 and no mark that says so",
        );
    }

    #[test]
    fn sets_that_show_something_else() {
        let mut manager = sound();
        let batch = &mut manager.batches.all[0];
        batch.shown[batch.turn].num_blocks[1] = 0;
        assert_named(
            &manager,
            "batch 0: row 1 of its next set shows 0 blocks and does not know what it missed",
        );
        let mut manager = sound();
        let batch = &mut manager.batches.all[0];
        batch.shown[1 - batch.turn].num_blocks[1] = 2;
        assert_named(&manager, "batch 0: row 1 of its last set shows 2 blocks, the last step showed 1");
    }
}

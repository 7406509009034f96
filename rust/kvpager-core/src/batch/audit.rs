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
                let id = self.sequences.rows.get(sequence_row).map_or(VACANT, |sequence| sequence.id);
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
            let sequence =
                self.sequences.rows.get(sequence_row as usize).filter(|sequence| sequence.id != VACANT);
            let Some(sequence) = sequence else {
                faults.push(format!("batch {name}: row {row} shows no sequence"));
                continue;
            };
            let id = sequence.id;
            if self.batches.place(sequence_row) != Some(Place { batch: batch.id, row: row as u32 }) {
                faults.push(format!("batch {name}: row {row} shows sequence {id}, which has another place"));
            }
            let (mark, num_shown) = (sequence.table.changed_from(), batch.previous[row]);
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

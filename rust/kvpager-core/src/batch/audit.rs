//! What must hold between the batches and the sequences they show.

use super::{Batch, BatchRow, Batches};
use crate::sequences::{SequenceTable, UNCHANGED};

impl Batches {
    /// Adds a line for each thing that is broken. O(rows + sequences).
    pub(crate) fn audit(&self, sequences: &SequenceTable, faults: &mut Vec<String>) {
        for batch in &self.all {
            self.audit_batch(batch, sequences, faults);
        }
        for (at, &shown) in self.row_of.iter().enumerate() {
            let Some(BatchRow { batch, row }) = shown else { continue };
            let shows = |candidate: &Batch| {
                candidate.id == batch
                    && candidate.rows.get(row as usize).is_some_and(|place| place.index() == at)
            };
            if !self.all.iter().any(shows) {
                faults.push(format!(
                    "sequence at place {at}: it has row {row} of batch {}, which does not show it",
                    batch.0
                ));
            }
        }
    }

    fn audit_batch(&self, batch: &Batch, sequences: &SequenceTable, faults: &mut Vec<String>) {
        let name = batch.id.0;
        let (num_rows, max_rows) = (batch.rows.len(), batch.shape.max_rows);
        if num_rows > max_rows || batch.is_new.len() != num_rows || batch.previous_rows > max_rows {
            faults.push(format!(
                "batch {name}: {num_rows} rows, marks of {}, room for {max_rows}",
                batch.is_new.len()
            ));
            return;
        }
        for (row, &place) in batch.rows.iter().enumerate() {
            let Some(sequence) = sequences.get_at(place) else {
                faults.push(format!("batch {name}: row {row} shows no sequence"));
                continue;
            };
            let id = sequence.id;
            if self.row(place) != Some(BatchRow { batch: batch.id, row: row as u32 }) {
                faults.push(format!("batch {name}: row {row} shows sequence {id}, which has another row"));
            }
            let (mark, num_shown) = (sequence.changed_from(), batch.previous[row]);
            let sound = match mark {
                UNCHANGED => !batch.is_new[row] && sequence.table.len() == num_shown as usize,
                _ => mark == 0 || (!batch.is_new[row] && mark <= num_shown),
            };
            if !sound {
                faults.push(format!(
                    "batch {name}: row {row} showed {num_shown} blocks of sequence {id}, which has {} and no mark \
                     that says so",
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
            if last.row_blocks[row] != showed {
                faults.push(format!(
                    "batch {name}: row {row} of its last set shows {} blocks, the last step showed {showed}",
                    last.row_blocks[row]
                ));
            }
            let missed = self.missed.iter().find(|&&(missed, _)| missed as usize == row);
            let sound = match missed {
                None => next.row_blocks[row] == showed,
                Some(&(_, from)) => from <= next.row_blocks[row],
            };
            if !sound {
                faults.push(format!(
                    "batch {name}: row {row} of its next set shows {} blocks and does not know what it missed",
                    next.row_blocks[row]
                ));
            }
        }
    }
}

/// What [`Batches::plant`] breaks.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum PlantedFault {
    NoRow,
    OtherBatch,
    LastRowGone,
    Vacant,
    Next(u32),
    Last(u32),
}

#[cfg(test)]
impl Batches {
    /// Breaks something of the first batch, for the tests of the audit.
    pub(crate) fn plant(&mut self, fault: PlantedFault) {
        let batch = &mut self.all[0];
        match fault {
            PlantedFault::NoRow => self.row_of[0] = None,
            PlantedFault::OtherBatch => self.row_of[1] = Some(BatchRow { batch: super::BatchId(5), row: 1 }),
            PlantedFault::LastRowGone => {
                batch.rows.pop();
                batch.is_new.pop();
            }
            PlantedFault::Vacant => batch.rows[1] = crate::sequences::Place::NOWHERE,
            PlantedFault::Next(num_blocks) => batch.shown[batch.turn].row_blocks[1] = num_blocks,
            PlantedFault::Last(num_blocks) => batch.shown[1 - batch.turn].row_blocks[1] = num_blocks,
        }
    }
}

//! Writing a step into the set whose turn it is. The appends are done; nothing here can refuse.

use super::{Batch, BatchBuffers, BatchStep, Shown};
use crate::sequence::{SequenceTable, UNCHANGED};
use crate::{BlockId, Slot};

/// The list of a step's changes. Counts on where its memory ends.
struct Changes<'a> {
    entries: &'a mut [[i32; 3]],
    len: usize,
}

impl Changes<'_> {
    #[inline]
    fn push(&mut self, row: usize, column: usize, block: i32) {
        if let Some(entry) = self.entries.get_mut(self.len) {
            *entry = [row as i32, column as i32, block];
        }
        self.len += 1;
    }

    /// A run of entries of one row, from `column` on.
    fn push_run(&mut self, row: usize, column: usize, blocks: impl ExactSizeIterator<Item = i32>) {
        let num_blocks = blocks.len();
        if let Some(room) = self.entries.get_mut(self.len..) {
            for ((entry, block), column) in room.iter_mut().zip(blocks).zip(column..) {
                *entry = [row as i32, column as i32, block];
            }
        }
        self.len += num_blocks;
    }
}

impl Batch {
    /// Writes "no rows" over whatever the sets hold.
    pub(super) fn show_nothing(&mut self, sets: &mut [BatchBuffers<'_>; 2]) {
        for (set, shown) in sets.iter_mut().zip(&mut self.shown) {
            set.block_tables.fill(-1);
            set.seq_lens.fill(0);
            set.query_start_loc.fill(0);
            set.slot_mapping.fill(-1);
            shown.num_blocks.fill(0);
            (shown.num_rows, shown.num_tokens, shown.one_each) = (0, 0, Some(0));
        }
    }

    /// Brings the set whose turn it is up to date and passes the turn on.
    pub(super) fn show(
        &mut self,
        sequences: &mut SequenceTable,
        sets: &mut [BatchBuffers<'_>; 2],
        counts: Option<&[u64]>,
    ) -> BatchStep {
        let [first, second] = sets;
        let (set, other) = if self.turn == 0 { (first, second) } else { (second, first) };
        let shown = &mut self.shown[self.turn];
        show_slots(&self.slots, set.slot_mapping, shown);
        show_starts(self.rows.len(), counts, set.query_start_loc, shown);
        self.catch_up(sequences, set.block_tables);
        let num_changes = self.show_rows(sequences, set, other.block_tables);

        let step = BatchStep {
            buffer_set: self.turn,
            num_rows: self.rows.len(),
            num_tokens: self.slots.len(),
            num_changes,
            upload_table: self.is_invalid || num_changes > self.shape.max_changes,
        };
        self.is_invalid = false;
        self.turn = 1 - self.turn;
        step
    }

    /// Writes what the previous step changed in the other set.
    fn catch_up(&mut self, sequences: &SequenceTable, tables: &mut [i32]) {
        let shown = &mut self.shown[self.turn];
        for &(row, from) in &self.missed {
            // A row that is gone is cleared with the others behind the last; a new one will be written whole.
            if let Some(&sequence_row) = self.rows.get(row as usize).filter(|_| !self.is_new[row as usize]) {
                let table = &*sequences.rows[sequence_row as usize].table;
                write_row(tables, self.shape.max_blocks, row as usize, table, from as usize, shown);
            }
        }
    }

    /// Writes lengths and what is new in the tables, and lists it; returns how many entries are new.
    fn show_rows(
        &mut self,
        sequences: &mut SequenceTable,
        set: &mut BatchBuffers<'_>,
        previous_tables: &[i32],
    ) -> usize {
        let max_blocks = self.shape.max_blocks;
        let shown = &mut self.shown[self.turn];
        let (entries, _) = set.changed.as_chunks_mut();
        let mut changes = Changes { entries, len: 0 };
        self.missed_next.clear();
        for ((row, &sequence_row), length) in self.rows.iter().enumerate().zip(&mut *set.seq_lens) {
            let sequence = &mut sequences.rows[sequence_row as usize];
            *length = sequence.length as i32;
            if sequence.table.changed_from() == UNCHANGED {
                continue;
            }
            let from = sequence.table.take_mark() as usize;
            let table = &*sequence.table;
            let num_shown = self.previous[row] as usize;
            if std::mem::take(&mut self.is_new[row]) {
                changes.push_run(row, 0, table.iter().map(|&block| block as i32));
            } else {
                let num_common = num_shown.min(table.len());
                let shown_row = &previous_tables[row * max_blocks..][..max_blocks];
                for column in from..num_common {
                    if shown_row[column] != table[column] as i32 {
                        changes.push(row, column, table[column] as i32);
                    }
                }
                let first_new = from.max(num_common);
                changes.push_run(row, first_new, table[first_new..].iter().map(|&block| block as i32));
            }
            if num_shown > table.len() {
                changes.push_run(row, table.len(), (table.len()..num_shown).map(|_| -1));
            }
            write_row(set.block_tables, max_blocks, row, table, from, shown);
            self.previous[row] = table.len() as u32;
            self.missed_next.push((row as u32, from as u32));
        }

        let num_rows = self.rows.len();
        for row in num_rows..self.previous_rows {
            let num_shown = std::mem::take(&mut self.previous[row]) as usize;
            changes.push_run(row, 0, (0..num_shown).map(|_| -1));
        }
        for row in num_rows..shown.num_rows {
            write_row(set.block_tables, max_blocks, row, &[], 0, shown);
            set.seq_lens[row] = 0;
        }
        shown.num_rows = num_rows;
        self.previous_rows = num_rows;
        std::mem::swap(&mut self.missed, &mut self.missed_next);
        changes.len
    }
}

/// Writes a table from a column on, and −1 over what the row showed behind its end.
#[inline]
fn write_row(
    tables: &mut [i32],
    max_blocks: usize,
    row: usize,
    table: &[BlockId],
    from: usize,
    shown: &mut Shown,
) {
    let row_entries = &mut tables[row * max_blocks..][..max_blocks];
    let num_shown = &mut shown.num_blocks[row];
    if let Some(blocks) = table.get(from..) {
        for (entry, &block) in row_entries[from..].iter_mut().zip(blocks) {
            *entry = block as i32;
        }
    }
    if *num_shown as usize > table.len() {
        row_entries[table.len()..*num_shown as usize].fill(-1);
    }
    *num_shown = table.len() as u32;
}

fn show_slots(slots: &[Slot], slot_mapping: &mut [i64], shown: &mut Shown) {
    slot_mapping[..slots.len()].copy_from_slice(slots);
    if let Some(gone) = slot_mapping.get_mut(slots.len()..shown.num_tokens) {
        gone.fill(-1);
    }
    shown.num_tokens = slots.len();
}

fn show_starts(num_rows: usize, counts: Option<&[u64]>, query_start_loc: &mut [i32], shown: &mut Shown) {
    let mut start = 0;
    if let Some(counts) = counts {
        for (entry, &count) in query_start_loc.iter_mut().zip(counts) {
            *entry = start;
            start += count as i32;
        }
    } else {
        if shown.one_each == Some(num_rows) {
            return; // as it stands
        }
        for entry in &mut query_start_loc[..num_rows] {
            *entry = start;
            start += 1;
        }
    }
    query_start_loc[num_rows..].fill(start);
    shown.one_each = counts.is_none().then_some(num_rows);
}

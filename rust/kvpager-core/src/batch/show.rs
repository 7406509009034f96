//! Writing a step into the set whose turn it is. The appends are done; nothing here can refuse.

use super::{Batch, BatchBuffers, BatchStep, Shown};
use crate::ids::BlockId;
use crate::sequences::{Place, SequenceTable, UNCHANGED};

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
            shown.row_blocks.fill(0);
            (shown.num_rows, shown.num_tokens) = (0, 0);
        }
    }

    /// Brings the set whose turn it is up to date and passes the turn on. The slots of the step have been given back.
    pub(crate) fn show(
        &mut self,
        sequences: &mut SequenceTable,
        sets: &mut [BatchBuffers<'_>; 2],
        counts: Option<&[u64]>,
    ) -> BatchStep {
        let (set, other) = in_turn(sets, self.turn);
        let shown = &mut self.shown[self.turn];
        set.slot_mapping[..self.slots.len()].copy_from_slice(&self.slots);
        clear_slots(self.slots.len(), set.slot_mapping, shown);
        show_starts(self.rows.len(), counts, set.query_start_loc);
        self.catch_up(sequences, set.block_tables);
        let (rows, mut tables) = self.tables(set.block_tables, other.block_tables, set.changed);
        for (row, (&place, length)) in rows.iter().zip(&mut *set.seq_lens).enumerate() {
            let counters = sequences.counters_mut(place);
            *length = counters.length() as i32;
            if counters.changed_from() != UNCHANGED {
                let from = counters.take_mark();
                tables.show(row, from as usize, sequences.table(place));
            }
        }
        let num_changes = tables.end(rows.len(), set.seq_lens);
        self.pass_turn(self.slots.len(), num_changes)
    }

    /// Writes what the previous step changed in the other set.
    fn catch_up(&mut self, sequences: &SequenceTable, tables: &mut [i32]) {
        let shown = &mut self.shown[self.turn];
        for &(row, from) in &self.missed {
            // A row that is gone is cleared with the others behind the last; a new one will be written whole.
            if let Some(&place) = self.rows.get(row as usize).filter(|_| !self.is_new[row as usize]) {
                let table = sequences.table(place);
                write_row(tables, self.shape.max_blocks, row as usize, table, from as usize, shown);
            }
        }
    }

    /// The rows, and what writes their tables.
    fn tables<'a>(
        &'a mut self,
        written: &'a mut [i32],
        previous: &'a [i32],
        changed: &'a mut [i32],
    ) -> (&'a [Place], Tables<'a>) {
        self.missed_next.clear();
        let (entries, _) = changed.as_chunks_mut();
        let tables = Tables {
            max_blocks: self.shape.max_blocks,
            written,
            previous,
            changes: Changes { entries, len: 0 },
            shown: &mut self.shown[self.turn],
            num_previous: &mut self.previous,
            previous_rows: self.previous_rows,
            is_new: &mut self.is_new,
            missed: &mut self.missed_next,
        };
        (&self.rows, tables)
    }

    /// The step is written: the next one writes the other set.
    fn pass_turn(&mut self, num_tokens: usize, num_changes: usize) -> BatchStep {
        let num_rows = self.rows.len();
        let step = BatchStep {
            buffer_set: self.turn,
            num_rows,
            num_tokens,
            num_changes,
            upload_table: self.is_invalid || num_changes > self.shape.max_changes,
        };
        std::mem::swap(&mut self.missed, &mut self.missed_next);
        self.previous_rows = num_rows;
        self.is_invalid = false;
        self.turn = 1 - self.turn;
        step
    }
}

/// The set that a step writes, and the one that the previous step wrote.
fn in_turn<'a, 'b>(
    [first, second]: &'a mut [BatchBuffers<'b>; 2],
    turn: usize,
) -> (&'a mut BatchBuffers<'b>, &'a mut BatchBuffers<'b>) {
    if turn == 0 { (first, second) } else { (second, first) }
}

/// What writes the tables of one step.
struct Tables<'a> {
    max_blocks: usize,
    written: &'a mut [i32],
    /// What the previous step showed, in the other set.
    previous: &'a [i32],
    changes: Changes<'a>,
    shown: &'a mut Shown,
    num_previous: &'a mut [u32],
    previous_rows: usize,
    is_new: &'a mut [bool],
    missed: &'a mut Vec<(u32, u32)>,
}

impl Tables<'_> {
    /// Writes what is new in the table of a row, from a column on, and lists it. Few rows need it: a call, so that the
    /// loop over the others keeps its registers.
    #[inline(never)]
    fn show(&mut self, row: usize, from: usize, table: &[BlockId]) {
        let (max_blocks, changes) = (self.max_blocks, &mut self.changes);
        let num_shown = self.num_previous[row] as usize;
        self.num_previous[row] = table.len() as u32;
        self.missed.push((row as u32, from as u32));
        if std::mem::take(&mut self.is_new[row]) {
            changes.push_run(row, 0, table.iter().map(|&block| block as i32));
        } else {
            let num_common = num_shown.min(table.len());
            let shown_row = &self.previous[row * max_blocks..][..max_blocks];
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
        write_row(self.written, max_blocks, row, table, from, self.shown);
    }

    /// Clears the rows behind the last; returns how many entries are new in all.
    fn end(mut self, num_rows: usize, seq_lens: &mut [i32]) -> usize {
        for row in num_rows..self.previous_rows {
            let num_shown = std::mem::take(&mut self.num_previous[row]) as usize;
            self.changes.push_run(row, 0, (0..num_shown).map(|_| -1));
        }
        for (row, length) in seq_lens.iter_mut().enumerate().take(self.shown.num_rows).skip(num_rows) {
            write_row(self.written, self.max_blocks, row, &[], 0, self.shown);
            *length = 0;
        }
        self.shown.num_rows = num_rows;
        self.changes.len
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
    let num_shown = &mut shown.row_blocks[row];
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

/// −1 over the slots that are in use no more.
fn clear_slots(num_tokens: usize, slot_mapping: &mut [i64], shown: &mut Shown) {
    if let Some(gone) = slot_mapping.get_mut(num_tokens..shown.num_tokens) {
        gone.fill(-1);
    }
    shown.num_tokens = num_tokens;
}

fn show_starts(num_rows: usize, counts: Option<&[u64]>, query_start_loc: &mut [i32]) {
    let (starts, behind) = query_start_loc.split_at_mut(num_rows);
    let mut start = 0;
    if let Some(counts) = counts {
        for (entry, &count) in starts.iter_mut().zip(counts) {
            *entry = start;
            start += count as i32;
        }
    } else {
        for (entry, row) in starts.iter_mut().zip(0..) {
            *entry = row;
        }
        start = num_rows as i32;
    }
    behind.fill(start);
}

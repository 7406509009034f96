//! The full audit: recounts everything from the block tables and the lists, and names what differs. Here: who holds
//! which block, and that every block is in exactly one state; the index and what hangs on it stand in `audit_index`.
//!
//! It trusts nothing: a table or a list may hold any number, links may run in a circle. It changes nothing, and takes
//! O(blocks used so far + table entries) time and memory.

use crate::manager::BlockManager;
use crate::pool::{FENCED, HELD, INDEXED, TAKEN};
use crate::sequence::{LONGEST_RUN, UNCHANGED, VACANT, View};
use crate::{BlockId, SequenceId};

/// Who holds each block, recounted; indexed by block, up to the watermark.
struct Recount {
    /// Table entries that name the block, plus the hold of a caller.
    holders: Vec<u32>,
    /// Appearances in the free stack.
    returned: Vec<u32>,
    /// Appearances in the list of fenced blocks.
    fenced: Vec<u32>,
    /// Appearances in the order of eviction.
    cached: Vec<u32>,
    /// Owed pairs that read the block.
    pins: Vec<u32>,
}

impl BlockManager {
    /// Audits the whole state. Empty means sound; each line names one thing that is broken, and where.
    /// O(blocks + table entries).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let manager = BlockManager::new(Config::new(8, 4)?)?;
    /// assert!(manager.check_invariants().is_empty());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn check_invariants(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let used = self.pool.watermark as usize;
        if self.pool.watermark > self.config.num_blocks() {
            faults.push(format!("watermark: {used} of {} blocks", self.config.num_blocks()));
            return faults;
        }
        let mut recount = Recount {
            holders: vec![0; used],
            returned: vec![0; used],
            fenced: vec![0; used],
            cached: vec![0; used],
            pins: vec![0; used],
        };
        self.audit_sequences(&mut recount, &mut faults);
        self.audit_lists(&mut recount, &mut faults);
        self.audit_copies(&mut recount, &mut faults);
        for block in 0..self.pool.watermark {
            self.audit_block(block, &recount, &mut faults);
        }
        self.audit_counters(&recount, &mut faults);
        self.audit_index(&mut faults);
        self.audit_batches(&mut faults);
        faults
    }

    /// Whether [`check_invariants`](Self::check_invariants) finds nothing. O(blocks + table entries).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// assert!(BlockManager::new(Config::new(8, 4)?)?.invariants_ok());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn invariants_ok(&self) -> bool {
        self.check_invariants().is_empty()
    }

    fn audit_sequences(&self, recount: &mut Recount, faults: &mut Vec<String>) {
        let num_rows = self.sequences.row_of.len() + self.sequences.vacant.len();
        if num_rows != self.sequences.rows.len() {
            faults.push(format!(
                "sequence table: {} rows, but {} used and {} vacant",
                self.sequences.rows.len(),
                self.sequences.row_of.len(),
                self.sequences.vacant.len()
            ));
        }
        for &row in &self.sequences.vacant {
            if self.sequences.ids.get(row as usize).is_none_or(|&id| id != VACANT) {
                faults.push(format!("sequence table: row {row} is listed as vacant, but is not"));
            }
        }
        for (&id, &row) in &self.sequences.row_of {
            match self.sequences.ids.get(row as usize) {
                Some(&found) if found == id => {
                    self.audit_sequence(self.sequences.view(row), recount, faults);
                }
                _ => faults.push(format!("sequence {id}: its row {row} is not its own")),
            }
        }
        for (block, holders) in recount.holders.iter_mut().enumerate() {
            *holders += u32::from(self.pool.has(block as BlockId, HELD));
        }
        for &block in self.pins.blocks_of.values().flatten() {
            match recount.holders.get_mut(block as usize) {
                Some(holders) => *holders += 1,
                None => faults.push(format!("pins: block {block} was never handed out")),
            }
        }
    }

    fn audit_sequence(&self, sequence: View<'_>, recount: &mut Recount, faults: &mut Vec<String>) {
        let View { id, table, .. } = sequence;
        let (length, open) = (sequence.length, sequence.open());
        let next_slot = sequence.slot_base + length as crate::Slot;
        let wanted = self.config.blocks_for(length);
        if table.len() as u64 != wanted {
            faults.push(format!(
                "sequence {id}: {} table entries, but {length} tokens fill {wanted}",
                table.len()
            ));
        }
        let changed_from = sequence.changed_from();
        if changed_from != UNCHANGED && changed_from as usize > table.len() {
            faults.push(format!(
                "sequence {id}: marked from column {changed_from}, past its {} entries",
                table.len()
            ));
        }
        for (logical, &block) in table.iter().enumerate() {
            match recount.holders.get_mut(block as usize) {
                Some(holders) => *holders += 1,
                None => faults
                    .push(format!("sequence {id}: entry {logical} names block {block}, never handed out")),
            }
        }
        if open == 0 {
            return;
        }
        let offset = length % self.config.block_size();
        let unwritten = self.config.block_size() - offset;
        let tail = table.last().copied().filter(|&tail| tail < self.pool.watermark);
        let sound = tail.is_some_and(|tail| {
            offset != 0
                && !self.pool.has(tail, INDEXED)
                && (open == unwritten || (open < unwritten && self.config.block_size() > LONGEST_RUN))
                && next_slot == self.config.slot(tail, offset)
                && self.pool.ref_count(tail) == 1
        });
        if !sound {
            faults.push(format!(
                "sequence {id}: {open} positions open at slot {next_slot}, which its tail does not allow"
            ));
        }
    }

    fn audit_lists(&self, recount: &mut Recount, faults: &mut Vec<String>) {
        for &block in &self.pool.returned {
            match recount.returned.get_mut(block as usize) {
                Some(count) => *count += 1,
                None => faults.push(format!("free list: block {block} was never handed out")),
            }
        }
        let fenced: Vec<BlockId> = self.pool.fences.list.iter(&self.pool.links).collect();
        for &block in &fenced {
            match recount.fenced.get_mut(block as usize) {
                Some(count) => *count += 1,
                None => faults.push(format!("fenced list: block {block} was never handed out")),
            }
        }
        let cached = self.pool.cached.order(&self.pool.links);
        for &block in &cached {
            match recount.cached.get_mut(block as usize) {
                Some(count) => *count += 1,
                None => faults.push(format!("eviction order: block {block} was never handed out")),
            }
        }
        if cached.len() != self.pool.cached.len() as usize {
            let (found, counted) = (cached.len(), self.pool.cached.len());
            faults.push(format!("eviction order: {found} blocks linked, {counted} counted"));
        }
        if fenced.len() != self.pool.fences.list.len() as usize {
            let (found, counted) = (fenced.len(), self.pool.fences.list.len());
            faults.push(format!("fenced list: {found} blocks linked, {counted} counted"));
        }
    }

    fn audit_copies(&self, recount: &mut Recount, faults: &mut Vec<String>) {
        let pairs: Vec<(BlockId, BlockId)> = self.copies.pairs(&self.pool).collect();
        if pairs.len() != self.copies.len() as usize {
            faults.push(format!("owed copies: {} pairs linked, {} counted", pairs.len(), self.copies.len()));
        }
        for &(source, _) in &pairs {
            if let Some(pins) = recount.pins.get_mut(source as usize) {
                *pins += 1;
            }
        }
        for &(source, destination) in &pairs {
            let pair = format!("owed copy {source} → {destination}");
            let Some(&holders) = recount.holders.get(destination as usize) else {
                faults.push(format!("{pair}: the destination was never handed out"));
                continue;
            };
            if holders != 1 {
                faults.push(format!("{pair}: the destination has {holders} holders, not 1"));
            }
            if self.pool.has(destination, HELD) {
                faults.push(format!("{pair}: the destination is held by a caller"));
            }
            if self.pool.has(destination, INDEXED) {
                faults.push(format!("{pair}: the destination is indexed"));
            }
            if recount.pins[destination as usize] > 0 {
                faults.push(format!("{pair}: the destination is a source too"));
            }
            if source >= self.pool.watermark {
                faults.push(format!("{pair}: the source was never handed out"));
            } else if recount.returned[source as usize] > 0 {
                faults.push(format!("{pair}: the source is free"));
            } else if recount.cached[source as usize] > 0 {
                faults.push(format!("{pair}: the source can be evicted"));
            }
        }
    }

    /// The states of one block exclude one another, and its ref count and pins are what the recount says.
    fn audit_block(&self, block: BlockId, recount: &Recount, faults: &mut Vec<String>) {
        let at = block as usize;
        let (holders, returned, fenced) = (recount.holders[at], recount.returned[at], recount.fenced[at]);
        let (ref_count, pins) = (self.pool.ref_counts[at], self.pool.pins[at]);
        if ref_count != holders {
            let owners = self.owners(block);
            let kind = if holders > ref_count && holders > 1 { "double owner" } else { "wrong ref count" };
            faults
                .push(format!("block {block}: {kind}: ref count {ref_count}, but {holders} holders{owners}"));
        }
        if pins != recount.pins[at] {
            faults.push(format!("block {block}: {pins} pins, but {} owed copies read it", recount.pins[at]));
        }
        let cached = recount.cached[at];
        let places = [
            (ref_count > 0 || holders > 0, "live"),
            (fenced > 0, "fenced"),
            (cached > 0, "in the order of eviction"),
            (returned > 0, "in the free list"),
        ];
        let mut found = places.iter().filter(|(is_there, _)| *is_there).map(|&(_, name)| name);
        match (found.next(), found.next()) {
            (None, _) => faults.push(format!(
                "block {block}: lost: no holder, not fenced, not in the order of eviction, not in the free list"
            )),
            (Some(first), Some(second)) => {
                faults.push(format!("block {block}: in both sets: {first} and {second}"));
            }
            (Some(_), None) => {}
        }
        for (count, kind, list) in [
            (returned, "double free", "free list"),
            (cached, "cached twice", "order of eviction"),
            (fenced, "fenced twice", "fenced list"),
        ] {
            if count > 1 {
                faults.push(format!("block {block}: {kind}: {count} times in the {list}"));
            }
        }
        if fenced > 0 && recount.pins[at] == 0 && self.pool.fences.is_retired(block) {
            let epoch = if self.pool.fences.are_on { " and its epoch is retired" } else { "" };
            faults.push(format!("block {block}: fenced, but no owed copy reads it{epoch}"));
        }
        if self.pool.has(block, FENCED) != (fenced > 0) || (self.pool.has(block, TAKEN) && fenced == 0) {
            faults.push(format!("block {block}: its marks of the fence are wrong"));
        }
        let is_indexed = self.pool.has(block, INDEXED);
        if cached > 0 && !is_indexed {
            faults.push(format!("block {block}: cached, but not indexed"));
        }
        if returned > 0 && is_indexed {
            faults.push(format!("block {block}: free, but indexed"));
        }
    }

    fn audit_counters(&self, recount: &Recount, faults: &mut Vec<String>) {
        let live =
            self.pool.ref_counts.iter().take(recount.holders.len()).filter(|&&count| count > 0).count();
        let stats = self.stats();
        if stats.live != live as u64 {
            faults.push(format!("counter `live`: {}, but {live} blocks have holders", stats.live));
        }
        if stats.peak_live < stats.live {
            faults.push(format!(
                "counter `peak_live`: {}, but {} blocks are live",
                stats.peak_live, stats.live
            ));
        }
        if stats.live + stats.cached + stats.fenced + stats.free != stats.num_blocks {
            faults.push(format!(
                "counters: {} live, {} cached, {} fenced and {} free don't sum to {} blocks",
                stats.live, stats.cached, stats.fenced, stats.free, stats.num_blocks
            ));
        }
        if stats.num_copies < u64::from(self.copies.len()) {
            let (counted, owed) = (stats.num_copies, self.copies.len());
            faults.push(format!("counter `num_copies`: {counted}, but {owed} pairs are owed"));
        }
    }

    /// The holders of a block in words, for a message.
    fn owners(&self, block: BlockId) -> String {
        let mut ids: Vec<SequenceId> = self
            .sequences
            .iter()
            .flat_map(|sequence| {
                sequence.table.iter().filter(|&&entry| entry == block).map(move |_| sequence.id)
            })
            .collect();
        ids.sort_unstable();
        let mut owners: Vec<String> = ids.iter().map(|id| format!("sequence {id}")).collect();
        if self.pool.flags.get(block as usize).is_some_and(|flags| flags & HELD != 0) {
            owners.push("a caller".to_owned());
        }
        if owners.is_empty() { String::new() } else { format!(" ({})", owners.join(", ")) }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    //! Each kind of corruption, planted by hand, is found and named.

    use super::*;
    use crate::Config;
    use crate::copies::CopyLedger;
    use crate::sequence::SequenceTable;

    /// Sequence 1 holds blocks 0 and 1, sequence 2 block 2; 4 was used and freed; a caller holds 3; 5 is fresh.
    fn sound() -> BlockManager {
        let mut manager = BlockManager::new(Config::new(6, 4).unwrap()).unwrap();
        for (id, num_tokens) in [(1, 6), (2, 3)] {
            manager.create_sequence(id).unwrap();
            manager.append_tokens(id, num_tokens, &mut Vec::new()).unwrap();
        }
        assert_eq!(manager.allocate_block(), Ok(3));
        assert_eq!(manager.allocate_block(), Ok(4));
        manager.free_block(4).unwrap();
        assert_eq!(manager.check_invariants(), [""; 0]);
        manager
    }

    /// Sequences 1 and 2 shared block 0; 1 has copied it to block 1, untaken; 2 was released, so 0 is fenced.
    fn owing() -> BlockManager {
        let mut manager = BlockManager::new(Config::new(4, 4).unwrap()).unwrap();
        manager.create_sequence(1).unwrap();
        manager.append_token(1).unwrap();
        manager.fork_sequence(1, 2, None).unwrap();
        manager.append_token(1).unwrap();
        manager.release_sequence(2).unwrap();
        assert_eq!(manager.stats().fenced, 1);
        assert_eq!(manager.check_invariants(), [""; 0]);
        manager
    }

    fn assert_named(manager: &BlockManager, wanted: &str) {
        let faults = manager.check_invariants();
        assert!(faults.iter().any(|fault| fault.contains(wanted)), "wanted {wanted:?} among {faults:#?}");
        assert!(!manager.invariants_ok());
    }

    fn replace(manager: &mut BlockManager, id: SequenceId, column: usize, block: BlockId) {
        let row = manager.sequences.find(id).unwrap() as usize;
        let SequenceTable { rows, tables, .. } = &mut manager.sequences;
        tables[row].replace(&mut rows[row], column, block);
    }

    #[test]
    fn double_owner() {
        let mut manager = sound();
        replace(&mut manager, 2, 0, 0);
        assert_named(&manager, "block 0: double owner: ref count 1, but 2 holders (sequence 1, sequence 2)");
        assert_named(&manager, "block 2: wrong ref count: ref count 1, but 0 holders");
    }

    #[test]
    fn caller_and_sequence_own_one_block() {
        let mut manager = sound();
        manager.pool.flags[2] |= HELD;
        assert_named(&manager, "block 2: double owner: ref count 1, but 2 holders (sequence 2, a caller)");
    }

    #[test]
    fn in_both_sets() {
        let mut manager = sound();
        manager.pool.returned.push(1);
        assert_named(&manager, "block 1: in both sets: live and in the free list");
        assert_named(&manager, "don't sum to 6 blocks");
    }

    #[test]
    fn double_free() {
        let mut manager = sound();
        manager.pool.returned.push(4);
        assert_named(&manager, "block 4: double free: 2 times in the free list");
    }

    #[test]
    fn lost() {
        let mut manager = sound();
        manager.pool.returned.clear();
        assert_named(&manager, "block 4: lost");
    }

    #[test]
    fn wrong_ref_count() {
        let mut manager = sound();
        manager.pool.ref_counts[1] = 2;
        assert_named(&manager, "block 1: wrong ref count: ref count 2, but 1 holders (sequence 1)");
    }

    #[test]
    fn table_and_length_disagree() {
        let mut manager = sound();
        manager.sequences.rows[0].length = 9;
        assert_named(&manager, "sequence 1: 2 table entries, but 9 tokens fill 3");
    }

    #[test]
    fn entries_outside_of_the_pool() {
        let mut manager = sound();
        replace(&mut manager, 1, 0, 77);
        manager.pool.returned.push(5);
        assert_named(&manager, "sequence 1: entry 0 names block 77, never handed out");
        assert_named(&manager, "free list: block 5 was never handed out");
    }

    #[test]
    fn open_run_over_a_shared_tail() {
        let mut manager = sound();
        manager.fork_sequence(1, 3, None).unwrap();
        manager.sequences.rows[0].open_run(2, 6);
        assert_named(&manager, "sequence 1: 2 positions open at slot 6, which its tail does not allow");
    }

    #[test]
    fn rows_and_ids_disagree() {
        let mut manager = sound();
        manager.sequences.ids[0] = 5;
        assert_named(&manager, "sequence 1: its row 0 is not its own");
        let mut manager = sound();
        manager.sequences.vacant.push(0);
        assert_named(&manager, "sequence table: 2 rows, but 2 used and 1 vacant");
        assert_named(&manager, "sequence table: row 0 is listed as vacant, but is not");
    }

    #[test]
    fn owed_pair_with_a_bad_end() {
        let mut manager = owing();
        manager.pool.unpin(0);
        assert_named(&manager, "owed copy 0 → 1: the source is free");
        assert_named(&manager, "block 0: 0 pins, but 1 owed copies read it");

        let mut manager = owing();
        manager.pool.flags[1] |= HELD;
        assert_named(&manager, "owed copy 0 → 1: the destination has 2 holders, not 1");

        let mut manager = owing();
        manager.copies.owe(&mut manager.pool, 1, 0);
        assert_named(&manager, "owed copy 0 → 1: the destination is a source too");
    }

    #[test]
    fn fenced_without_a_reason() {
        let mut manager = owing();
        manager.pool.pins[0] = 0;
        manager.copies = CopyLedger::new(4);
        assert_named(&manager, "block 0: fenced, but no owed copy reads it");
    }

    #[test]
    fn links_in_a_circle() {
        let mut manager = owing();
        manager.pool.fences.list.push_back(&mut manager.pool.links, 0);
        assert!(!manager.invariants_ok());
    }

    #[test]
    fn counters_differ_from_the_recount() {
        let mut manager = sound();
        manager.pool.live += 1;
        assert_named(&manager, "counter `live`: 5, but 4 blocks have holders");
        let mut manager = sound();
        manager.pool.peak_live = 1;
        assert_named(&manager, "counter `peak_live`: 1, but 4 blocks are live");
        let mut manager = owing();
        manager.copies.num_owed_ever = 0;
        assert_named(&manager, "counter `num_copies`: 0, but 1 pairs are owed");
    }
}

//! The full audit: recounts everything from the block tables and the lists, and names what differs. Each data structure
//! recounts itself; here they are asked in turn, and what holds between them is looked at.
//!
//! It trusts nothing: a table or a list may hold any number, links may run in a circle. It changes nothing, and takes
//! O(blocks used so far + S · nodes + table entries) time, and memory without the S.

use super::BlockManager;
use crate::ids::{BlockId, SequenceId};
use crate::sequences::{SequenceCounters, UNCHANGED, View};

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
        let Some(mut recount) = self.pool.recount(&mut faults) else { return faults };
        self.sequences.audit(&mut recount, &mut faults);
        self.pins.audit(self.config.max_pinned_blocks(), &mut recount, &mut faults);
        self.copies.audit(&self.pool, &mut recount, &mut faults);
        self.pool.audit(&recount, |block| self.owners(block), &mut faults);
        for sequence in self.sequences.iter() {
            self.audit_sequence(sequence, &mut faults);
        }
        if self.config.prefix_caching() {
            self.pool.audit_nodes(&mut faults);
            let namespaces = self.sequences.iter().map(|sequence| sequence.chain.namespace());
            self.pool.index().audit_users(namespaces, &mut faults);
            for sequence in self.sequences.iter() {
                self.audit_chain(sequence, &mut faults);
            }
        }
        self.batches.audit(&self.sequences, &mut faults);
        faults
    }

    /// A sequence's table is as long as its tokens need, its mark lies in it, and an open run in a tail of its own.
    fn audit_sequence(&self, sequence: View<'_>, faults: &mut Vec<String>) {
        let View { id, table, .. } = sequence;
        let (length, open, block_size) = (sequence.length(), sequence.open(), self.config.block_size());
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
        if open == 0 {
            return;
        }
        let (offset, next_slot) = (length % block_size, sequence.next_slot());
        let sound = table.last().copied().filter(|&tail| self.pool.has_used(tail)).is_some_and(|tail| {
            offset != 0
                && !self.pool.is_indexed(tail)
                && SequenceCounters::may_be_open(open, block_size - offset, block_size)
                && next_slot == self.config.slot(tail, offset)
                && self.pool.ref_count(tail) == 1
        });
        if !sound {
            faults.push(format!(
                "sequence {id}: {open} positions open at slot {next_slot}, which its tail does not allow"
            ));
        }
    }

    /// A sequence's first blocks are the nodes of its own tokens; a node further on is a tail that was cut.
    fn audit_chain(&self, sequence: View<'_>, faults: &mut Vec<String>) {
        let View { id, chain, .. } = sequence;
        let (block_size, num_indexed) = (self.config.block_size(), chain.num_indexed());
        let (computed, length) = (sequence.computed(), sequence.length());
        if let Some(fault) = chain.fault(computed, block_size) {
            faults.push(format!("sequence {id}: {fault}"));
        }
        if computed > length {
            faults.push(format!("sequence {id}: {computed} computed of {length} tokens"));
        }
        if num_indexed as u64 * block_size > computed || (chain.is_stale() && num_indexed > 0) {
            faults.push(format!("sequence {id}: {num_indexed} blocks indexed of {computed} tokens"));
            return;
        }
        let index = self.pool.index();
        let mut parent_id = index.root_id(chain.namespace());
        for (logical, &block) in sequence.table.iter().enumerate() {
            if !self.pool.has_used(block) {
                return; // said elsewhere
            }
            let is_indexed = self.pool.is_indexed(block);
            if logical >= num_indexed {
                let is_cut = logical as u64 == length / block_size && sequence.open() == 0;
                if is_indexed && !is_cut {
                    faults.push(format!("sequence {id}: entry {logical} is indexed, but its chain is not"));
                }
                continue;
            }
            let Some(node) = index.audited_node(block).filter(|_| is_indexed) else {
                faults.push(format!("sequence {id}: entry {logical} counts as indexed, but is not"));
                return;
            };
            let start = logical as u64 * block_size;
            let differs =
                !chain.has_dropped(start) && chain.known(start, start + block_size) != Some(node.token_ids);
            if node.parent_id != parent_id || differs {
                faults.push(format!("sequence {id}: entry {logical} is the node of other content"));
            }
            parent_id = node.id;
        }
    }

    /// The holders of a block in words, for a message.
    fn owners(&self, block: BlockId) -> String {
        let entries = |sequence: View<'_>| sequence.table.iter().filter(|&&entry| entry == block).count();
        let mut ids: Vec<SequenceId> = self
            .sequences
            .iter()
            .flat_map(|sequence| std::iter::repeat_n(sequence.id, entries(sequence)))
            .collect();
        ids.sort_unstable();
        let mut owners: Vec<String> = ids.iter().map(|id| format!("sequence {id}")).collect();
        if self.pool.is_held(block) {
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
    use crate::batch::{BatchMemory, BatchShape, PlantedFault as InBatches};
    use crate::config::Config;
    use crate::copies::CopyLedger;
    use crate::eviction::EvictionPolicy;
    use crate::index::PlantedFault as InIndex;
    use crate::manager::AdmitOptions;
    use crate::pins::PlantedFault as InPins;
    use crate::pool::Planted;
    use crate::prompt::{Item, Prompt};
    use crate::sequences::PlantedFault as InSequences;

    /// Sequence 1 holds blocks 0 and 1, sequence 2 block 2; 4 was used and freed; a caller holds 3; 5 is fresh.
    fn sound() -> BlockManager {
        let mut manager = BlockManager::new(Config::new(6, 4).unwrap()).unwrap();
        for (id, num_tokens) in [(1, 6), (2, 3)] {
            manager.create_sequence(id).unwrap();
            manager.append_tokens(id, num_tokens, None, &mut Vec::new()).unwrap();
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
        manager.append_token(1, None).unwrap();
        manager.fork_sequence(1, 2, None).unwrap();
        manager.append_token(1, None).unwrap();
        manager.release_sequence(2).unwrap();
        assert_eq!(manager.stats().fenced, 1);
        assert_eq!(manager.check_invariants(), [""; 0]);
        manager
    }

    fn assert_named(manager: &BlockManager, wanted: &str) {
        let faults = manager.check_invariants();
        assert!(faults.iter().any(|fault| fault.contains(wanted)), "wanted {wanted:?} among {faults:#?}");
    }

    fn replace(manager: &mut BlockManager, id: SequenceId, column: usize, block: BlockId) {
        let place = manager.sequences.find(id).unwrap();
        manager.sequences.replace_block(place, column, block);
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
        manager.pool.plant(Planted::Held(2));
        assert_named(&manager, "block 2: double owner: ref count 1, but 2 holders (sequence 2, a caller)");
    }

    #[test]
    fn in_both_sets() {
        let mut manager = sound();
        manager.pool.plant(Planted::Returned(1));
        assert_named(&manager, "block 1: in both sets: live and in the free list");
        assert_named(&manager, "don't sum to 6 blocks");
    }

    #[test]
    fn double_free() {
        let mut manager = sound();
        manager.pool.plant(Planted::Returned(4));
        assert_named(&manager, "block 4: double free: 2 times in the free list");
    }

    #[test]
    fn lost() {
        let mut manager = sound();
        manager.pool.plant(Planted::NothingReturned);
        assert_named(&manager, "block 4: lost");
    }

    #[test]
    fn wrong_ref_count() {
        let mut manager = sound();
        manager.pool.plant(Planted::RefCount(1, 2));
        assert_named(&manager, "block 1: wrong ref count: ref count 2, but 1 holders (sequence 1)");
    }

    #[test]
    fn table_and_length_disagree() {
        let mut manager = sound();
        manager.sequences.plant(InSequences::Length(9));
        assert_named(&manager, "sequence 1: 2 table entries, but 9 tokens fill 3");
    }

    #[test]
    fn entries_outside_of_the_pool() {
        let mut manager = sound();
        replace(&mut manager, 1, 0, 77);
        manager.pool.plant(Planted::Returned(5));
        assert_named(&manager, "sequence 1: entry 0 names block 77, never handed out");
        assert_named(&manager, "free list: block 5 was never handed out");
    }

    #[test]
    fn open_run_over_a_shared_tail() {
        let mut manager = sound();
        manager.fork_sequence(1, 3, None).unwrap();
        let place = manager.sequences.find(1).unwrap();
        manager.sequences.counters_mut(place).open_run(2, 6);
        assert_named(&manager, "sequence 1: 2 positions open at slot 6, which its tail does not allow");
    }

    #[test]
    fn places_and_ids_disagree() {
        let mut manager = sound();
        manager.sequences.plant(InSequences::Id(5));
        assert_named(&manager, "sequence 1: its place 0 is not its own");
        let mut manager = sound();
        manager.sequences.plant(InSequences::Vacant);
        assert_named(&manager, "sequence table: 2 places, but 2 used and 1 vacant");
        assert_named(&manager, "sequence table: place 0 is listed as vacant, but is not");
    }

    #[test]
    fn owed_pair_with_a_bad_end() {
        let mut manager = owing();
        manager.pool.drop_reader(0);
        assert_named(&manager, "owed copy 0 → 1: the source is free");
        assert_named(&manager, "block 0: 0 readers, but 1 owed copies read it");

        let mut manager = owing();
        manager.pool.plant(Planted::Held(1));
        assert_named(&manager, "owed copy 0 → 1: the destination has 2 holders, not 1");

        let mut manager = owing();
        manager.copies.owe(&mut manager.pool, 1, 0);
        assert_named(&manager, "owed copy 0 → 1: the destination is a source too");
    }

    #[test]
    fn fenced_without_a_reason() {
        let mut manager = owing();
        manager.pool.plant(Planted::NoReader(0));
        manager.copies = CopyLedger::new(4);
        assert_named(&manager, "block 0: fenced, but no owed copy reads it");
    }

    #[test]
    fn links_in_a_circle() {
        let mut manager = owing();
        manager.pool.plant(Planted::FencedAgain(0));
        assert!(!manager.check_invariants().is_empty());
    }

    #[test]
    fn counters_differ_from_the_recount() {
        let mut manager = sound();
        manager.pool.plant(Planted::Live);
        assert_named(&manager, "counter `live`: 5, but 4 blocks have holders");
        let mut manager = sound();
        manager.pool.plant(Planted::PeakLive);
        assert_named(&manager, "counter `peak_live`: 1, but 4 blocks are live");
        let mut manager = owing();
        manager.copies.forget_count();
        assert_named(&manager, "counter `num_copies`: 0, but 1 pairs are owed");
    }

    // ---- the index ------------------------------------------------------------------------------------------------

    /// Blocks 0, 1 hold [1, 2], [3, 4] and are sequence 1's, with a tail; 3, 4 hold the same under a salt, cached.
    fn indexed(policy: EvictionPolicy) -> BlockManager {
        let config = Config::new(8, 2).unwrap().with_prefix_caching(true).with_eviction_policy(policy);
        let mut manager = BlockManager::new(config).unwrap();
        let plain = Prompt::new(&[1, 2, 3, 4, 5]);
        let items = [Item { start: 0, stop: 1, key: "image" }];
        let salted = Prompt { salt: Some("salt"), items: &items, ..plain };
        for (id, prompt) in [(1, &plain), (2, &salted)] {
            manager.admit(id, prompt, &AdmitOptions::default(), &mut Vec::new()).unwrap();
            manager.commit(id, 5, None).unwrap();
        }
        manager.release_sequence(2).unwrap();
        assert_eq!(manager.check_invariants(), [""; 0]);
        assert_eq!(manager.stats().cached, 2);
        manager
    }

    fn lru() -> BlockManager {
        indexed(EvictionPolicy::Lru)
    }

    #[test]
    fn nodes_that_are_not_their_content() {
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::Token(0));
        assert_named(&manager, "block 0: its hash is not that of its content");
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::ParentId(1));
        assert_named(&manager, "sequence 1: entry 1 is the node of other content");
        assert_named(&manager, "block 1: indexed, but its parent is not");
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::SameId(1, 0));
        assert_named(&manager, "blocks 0 and 1: both are node");
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::NumChildren(0));
        assert_named(&manager, "block 0: 2 children counted, the index has 1");
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::NumNodes);
        assert_named(&manager, "prefix index: 4 nodes, but 5 counted and 4 entries in the table");
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::Buckets);
        assert_named(&manager, "block 1: indexed, but not found by its content");
    }

    #[test]
    fn marks_and_nodes_disagree() {
        let mut manager = lru();
        manager.pool.plant(Planted::Indexed(1, false));
        assert_named(&manager, "block 1: a node, but not marked as indexed");
        let mut manager = lru();
        manager.pool.plant(Planted::Indexed(2, true));
        assert_named(&manager, "block 2: marked as indexed, but no node");
        let mut manager = lru();
        manager.pool.plant(Planted::Indexed(3, false));
        assert_named(&manager, "block 3: cached, but not indexed");
    }

    #[test]
    fn chains_that_say_too_much() {
        let mut manager = lru();
        manager.sequences.plant(InSequences::NumIndexed(3));
        assert_named(&manager, "sequence 1: 3 blocks indexed of 5 tokens");
        let mut manager = lru();
        manager.sequences.plant(InSequences::Computed(6));
        assert_named(&manager, "sequence 1: 6 computed of 5 tokens");
        let mut manager = lru();
        manager.sequences.plant(InSequences::NumIndexed(1));
        assert_named(&manager, "sequence 1: entry 1 is indexed, but its chain is not");
    }

    #[test]
    fn counts_of_users() {
        let mut manager = lru();
        manager.pool.index_mut().share_namespace(1);
        assert_named(&manager, "namespace 1: 2 users counted, 1 found");
        let mut manager = lru();
        manager.pool.index_mut().plant(InIndex::ItemKeyUser(1));
        assert_named(&manager, "key 1: 2 users counted, 1 found");
        let mut manager = lru();
        let pin = manager.pin_prefix(&Prompt::new(&[1, 2])).unwrap();
        manager.pins.plant(InPins::Count(0, 2));
        assert_named(&manager, "block 0: 2 pins of callers counted, 1 hold it");
        manager.pins.plant(InPins::NoCounts);
        assert_named(&manager, "counter `pinned`: 0 of 8, but 1 are");
        manager.pins.plant(InPins::NoPin(pin));
        assert_named(&manager, "block 0: wrong ref count: ref count 2, but 1 holders (sequence 1)");
    }

    #[test]
    fn a_parent_before_its_child() {
        let mut manager = lru();
        manager.pool.plant(Planted::CachedLast(4));
        assert_named(&manager, "block 3: would be evicted before its child 4");
    }

    #[test]
    fn blocks_cached_and_elsewhere() {
        let mut manager = lru();
        manager.pool.plant(Planted::Cached(0));
        assert_named(&manager, "block 0: in both sets: live and in the order of eviction");
        let mut manager = lru();
        manager.pool.plant(Planted::Returned(3));
        assert_named(&manager, "block 3: in both sets: in the order of eviction and in the free list");
        assert_named(&manager, "block 3: free, but indexed");
    }

    #[test]
    fn segments_and_marks_disagree() {
        let mut manager = indexed(EvictionPolicy::Slru);
        manager.pool.hit(4);
        assert_named(&manager, "block 4: on probation, but marked as hit");
        assert_named(&manager, "block 4: marked as hit, but its parent 3 is not");
        manager.pool.hit(2);
        assert_named(&manager, "block 2: marked as hit, but not indexed");
    }

    #[test]
    fn fences_out_of_order() {
        let mut manager = BlockManager::new(Config::new(4, 2).unwrap().with_fences(true)).unwrap();
        for _ in 0..3 {
            manager.allocate_block().unwrap();
        }
        manager.free_block(0).unwrap();
        manager.advance_epoch().unwrap();
        manager.free_block(1).unwrap();
        assert_eq!(manager.check_invariants(), [""; 0]);
        let broken = manager.clone();
        manager.pool.plant(Planted::FirstOpen(1));
        assert_named(&manager, "block 0: fenced, but no owed copy reads it and its epoch is retired");
        let mut manager = broken;
        manager.pool.plant(Planted::FencedLast(0));
        assert_named(&manager, "fenced list: not in the order in which the blocks were freed");
        manager.pool.plant(Planted::Taken(2));
        assert_named(&manager, "block 2: its marks of the fence are wrong");
    }

    // ---- batches --------------------------------------------------------------------------------------------------

    /// Batch 0 shows sequences 7 and 8, one block each, and has stepped twice.
    fn batched() -> BlockManager {
        let mut manager = BlockManager::new(Config::new(8, 4).unwrap()).unwrap();
        let shape = BatchShape { max_rows: 3, max_blocks: 2, max_tokens: 3, max_changes: 3 };
        let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
        let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend)).unwrap();
        for id in [7, 8] {
            manager.create_sequence(id).unwrap();
            manager.batch(batch).unwrap().add(id).unwrap();
        }
        for _ in 0..2 {
            manager
                .batch(batch)
                .unwrap()
                .step(&mut memory.each_mut().map(BatchMemory::lend), None, None)
                .unwrap();
        }
        assert_eq!(manager.check_invariants(), [""; 0]);
        manager
    }

    #[test]
    fn a_row_without_its_place() {
        let mut manager = batched();
        manager.batches.plant(InBatches::NoRow);
        assert_named(&manager, "batch 0: row 0 shows sequence 7, which has another row");
    }

    #[test]
    fn a_place_without_its_row() {
        let mut manager = batched();
        manager.batches.plant(InBatches::LastRowGone);
        assert_named(&manager, "sequence at place 1: it has row 1 of batch 0, which does not show it");
        let mut manager = batched();
        manager.batches.plant(InBatches::OtherBatch);
        assert_named(&manager, "sequence at place 1: it has row 1 of batch 5, which does not show it");
    }

    #[test]
    fn a_row_that_shows_nothing() {
        let mut manager = batched();
        manager.batches.plant(InBatches::Vacant);
        assert_named(&manager, "batch 0: row 1 shows no sequence");
    }

    #[test]
    fn a_change_without_its_mark() {
        let mut manager = batched();
        manager.append_tokens(7, 3, None, &mut Vec::new()).unwrap();
        assert_eq!(manager.check_invariants(), [""; 0]);
        let place = manager.sequences.find(7).unwrap();
        manager.sequences.counters_mut(place).take_mark();
        assert_named(
            &manager,
            "batch 0: row 0 showed 1 blocks of sequence 7, which has 2 and no mark that says so",
        );
    }

    #[test]
    fn sets_that_show_something_else() {
        let mut manager = batched();
        manager.batches.plant(InBatches::Next(0));
        assert_named(
            &manager,
            "batch 0: row 1 of its next set shows 0 blocks and does not know what it missed",
        );
        let mut manager = batched();
        manager.batches.plant(InBatches::Last(2));
        assert_named(&manager, "batch 0: row 1 of its last set shows 2 blocks, the last step showed 1");
    }
}

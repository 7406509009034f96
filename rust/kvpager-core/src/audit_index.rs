//! The audit of the prefix index: that every node is what its content says and can be found by it, that chains, pins and
//! keys agree with it, and that the order of eviction and the fence keep it prefix-closed.
//!
//! O(S · nodes + table entries); trusts no count and no link of the index.

use std::collections::HashMap;

use crate::BlockId;
use crate::chain::Chain;
use crate::eviction::Policy;
use crate::index::Node;
use crate::keys::{Interner, NO_KEY};
use crate::links::List;
use crate::manager::BlockManager;
use crate::pool::{INDEXED, TAKEN};
use crate::sequence::View;

impl BlockManager {
    pub(crate) fn audit_index(&self, faults: &mut Vec<String>) {
        for row in 0..self.sequences.rows.len() {
            self.audit_chain(self.sequences.view(row as u32), &self.sequences.chains[row], faults);
        }
        self.audit_pins(faults);
        self.audit_fence_order(faults);
        if !self.config.prefix_caching() {
            return;
        }
        self.audit_nodes(faults);
        self.audit_users(faults);
        self.audit_eviction_order(faults);
        self.audit_segments(faults);
    }

    /// The nodes that there are, by block; the audit looks at none that the pool does not know.
    fn nodes(&self) -> impl Iterator<Item = (BlockId, &Node)> {
        let nodes = self.pool.index.nodes.iter().enumerate();
        nodes.filter(|(_, node)| node.id != 0).map(|(block, node)| (block as BlockId, node))
    }

    fn audit_nodes(&self, faults: &mut Vec<String>) {
        let index = &self.pool.index;
        let mut num_children: HashMap<BlockId, u32> = HashMap::new();
        let mut block_of: HashMap<u64, BlockId> = HashMap::new();
        let mut num_nodes = 0;
        for (block, node) in self.nodes() {
            num_nodes += 1;
            if let Some(other) = block_of.insert(node.id, block) {
                faults.push(format!("blocks {other} and {block}: both are node {}", node.id));
            }
            if let Some(parent) = node.parent_block() {
                *num_children.entry(parent).or_default() += 1;
            }
            if block >= self.pool.watermark || !self.pool.has(block, INDEXED) {
                faults.push(format!("block {block}: a node, but not marked as indexed"));
            }
            match index.audited_parent(node) {
                None => faults.push(format!("block {block}: indexed, but its parent is not")),
                Some(parent) => {
                    let tokens = index.tokens_of(block);
                    let hash = index.chain(&parent, tokens, index.key_hash(node.key));
                    if hash != node.hash {
                        faults.push(format!("block {block}: its hash is not that of its content"));
                    } else if index.find(&parent, hash, tokens, node.key).ok() != Some(block) {
                        faults.push(format!("block {block}: indexed, but not found by its content"));
                    }
                }
            }
        }
        for block in 0..self.pool.watermark {
            if self.pool.has(block, INDEXED)
                && index.nodes.get(block as usize).is_none_or(|node| node.id == 0)
            {
                faults.push(format!("block {block}: marked as indexed, but no node"));
            }
        }
        for (block, node) in self.nodes() {
            let found = num_children.get(&block).copied().unwrap_or(0);
            if node.num_children != found {
                let counted = node.num_children;
                faults.push(format!("block {block}: {counted} children counted, the index has {found}"));
            }
        }
        let (num_entries, miscounted) = index.table.recount(|block| index.hash_of(block));
        if let Some(bucket) = miscounted {
            faults.push(format!("prefix index: bucket {bucket} counts the entries that passed it wrongly"));
        }
        if index.num_nodes != num_nodes || num_entries != num_nodes as usize {
            let counted = index.num_nodes;
            faults.push(format!(
                "prefix index: {num_nodes} nodes, but {counted} counted and {num_entries} entries in the table"
            ));
        }
    }

    /// A sequence's first blocks are the nodes of its own tokens; a node further on is a tail that was cut.
    fn audit_chain(&self, sequence: View<'_>, chain: &Chain, faults: &mut Vec<String>) {
        let (id, block_size) = (sequence.id, self.config.block_size());
        if !self.config.prefix_caching() {
            return; // what is computed is not kept
        }
        let (computed, length) = (sequence.computed, sequence.length);
        if let Some(fault) = chain.fault(computed, block_size) {
            faults.push(format!("sequence {id}: {fault}"));
        }
        if computed > length {
            faults.push(format!("sequence {id}: {computed} computed of {length} tokens"));
        }
        if chain.num_indexed as u64 * block_size > computed || (chain.is_stale && chain.num_indexed > 0) {
            faults.push(format!("sequence {id}: {} blocks indexed of {computed} tokens", chain.num_indexed));
            return;
        }
        if let Some(fault) = self.direct_fault(sequence, chain) {
            faults.push(format!("sequence {id}: {fault}"));
        }
        let index = &self.pool.index;
        let mut parent = index.root(chain.namespace);
        for (logical, &block) in sequence.table.iter().enumerate() {
            if block >= self.pool.watermark {
                return; // said elsewhere
            }
            let is_indexed = self.pool.has(block, INDEXED);
            if logical >= chain.num_indexed {
                let is_cut = logical as u64 == length / block_size && sequence.open() == 0;
                if is_indexed && !is_cut {
                    faults.push(format!("sequence {id}: entry {logical} is indexed, but its chain is not"));
                }
                continue;
            }
            let node = index.nodes.get(block as usize).filter(|node| node.id != 0 && is_indexed);
            let start = logical as u64 * block_size;
            let tokens = chain.known(start, start + block_size);
            let Some(node) = node else {
                faults.push(format!("sequence {id}: entry {logical} counts as indexed, but is not"));
                return;
            };
            let differs = !chain.has_dropped(start) && tokens != Some(index.tokens_of(block));
            if node.parent_id != parent.id() || differs {
                faults.push(format!("sequence {id}: entry {logical} is the node of other content"));
            }
            parent = index.parent(block);
        }
    }

    fn audit_pins(&self, faults: &mut Vec<String>) {
        let mut found: HashMap<BlockId, u32> = HashMap::new();
        for &block in self.pins.blocks_of.values().flatten() {
            *found.entry(block).or_default() += 1;
        }
        for (&block, &num_pins) in &found {
            if self.pins.on(block) != num_pins {
                let counted = self.pins.on(block);
                faults.push(format!("block {block}: {counted} pins of callers counted, {num_pins} hold it"));
            }
        }
        let (counted, quota) = (self.pins.count_of.len(), self.config.max_pinned_blocks());
        if counted != found.len() || counted > quota as usize {
            faults.push(format!("counter `pinned`: {counted} of {quota}, but {} are", found.len()));
        }
    }

    /// Along the fenced list the epochs never fall, copy sources that were taken later aside.
    fn audit_fence_order(&self, faults: &mut Vec<String>) {
        let fences = &self.pool.fences;
        if fences.first_open > fences.current {
            faults.push(format!("epochs: {} retired, {} is open", fences.first_open, fences.current));
        }
        let blocks = fences.list.iter(&self.pool.links).filter(|&block| block < self.pool.watermark);
        let ages: Vec<u32> =
            blocks.filter(|&block| !self.pool.has(block, TAKEN)).map(|block| fences.age(block)).collect();
        if !ages.is_sorted_by(|earlier, later| earlier >= later) {
            faults.push("fenced list: not in the order in which the blocks were freed".to_owned());
        }
    }

    /// Nodes and sequences that use a namespace, nodes that use a key.
    fn audit_users(&self, faults: &mut Vec<String>) {
        let index = &self.pool.index;
        let mut namespaces: HashMap<u32, u32> = HashMap::new();
        let mut keys: HashMap<u32, u32> = HashMap::new();
        for (_, node) in self.nodes() {
            *keys.entry(node.key).or_default() += 1;
            if let Some(namespace) = node.namespace() {
                *namespaces.entry(namespace).or_default() += 1;
            }
        }
        for sequence in self.sequences.iter() {
            if let Ok(row) = self.sequences.find(sequence.id) {
                *namespaces.entry(self.sequences.chains[row as usize].namespace).or_default() += 1;
            }
        }
        let mut check = |kind: &str, interner: &Interner, found: &HashMap<u32, u32>| {
            for (slot, entry) in interner.entries.iter().enumerate() {
                let found = found.get(&(slot as u32)).copied().unwrap_or(0);
                if slot as u32 != NO_KEY && entry.num_users != found {
                    faults.push(format!("{kind} {slot}: {} users counted, {found} found", entry.num_users));
                }
            }
            let in_use = interner.entries.iter().skip(1).filter(|entry| entry.num_users > 0).count();
            if interner.len() != in_use {
                faults.push(format!("{kind}s: {} counted, {in_use} in use", interner.len()));
            }
        };
        check("namespace", &index.namespaces, &namespaces);
        check("key", &index.item_keys, &keys);
    }

    /// No block is evicted before its children: they stand before it, and none of them is elsewhere without a holder.
    fn audit_eviction_order(&self, faults: &mut Vec<String>) {
        let order = self.pool.cached.order(&self.pool.links);
        let rank: HashMap<BlockId, usize> =
            order.iter().enumerate().map(|(rank, &block)| (block, rank)).collect();
        for (block, node) in self.nodes() {
            let Some(parent) = node.parent_block() else { continue };
            let Some(parent_rank) = rank.get(&parent) else { continue };
            if rank.get(&block).is_none_or(|rank| rank > parent_rank) {
                faults.push(format!("block {parent}: would be evicted before its child {block}"));
            }
        }
    }

    fn audit_segments(&self, faults: &mut Vec<String>) {
        let Policy::Slru(slru) = &self.pool.cached else { return };
        let links = &self.pool.links;
        let in_list = |list: &List| list.iter(links).collect::<Vec<BlockId>>();
        let (probation, protected) = (in_list(&slru.probation), in_list(&slru.protected));
        let is_known = |block: BlockId| (block as usize) < slru.marks.len();
        for &block in protected.iter().filter(|&&block| is_known(block)) {
            if !slru.is_protected(block) || !slru.is_marked(block) {
                faults.push(format!("block {block}: protected, but not marked so"));
            }
        }
        for &block in probation.iter().filter(|&&block| is_known(block)) {
            if slru.is_protected(block) || slru.is_marked(block) {
                faults.push(format!("block {block}: on probation, but marked as hit"));
            }
        }
        if slru.protected.len() > slru.capacity {
            let (len, capacity) = (slru.protected.len(), slru.capacity);
            faults.push(format!("protected blocks: {len}, at most {capacity} may be"));
        }
        for block in 0..self.pool.watermark {
            if slru.is_marked(block) && !self.pool.has(block, INDEXED) {
                faults.push(format!("block {block}: marked as hit, but not indexed"));
            }
        }
        for (block, node) in self.nodes() {
            let Some(parent) = node.parent_block().filter(|&parent| is_known(parent)) else { continue };
            if is_known(block) && slru.is_marked(block) && !slru.is_marked(parent) {
                faults.push(format!("block {block}: marked as hit, but its parent {parent} is not"));
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    //! Each kind of corruption, planted by hand, is found and named.

    use super::*;
    use crate::{AdmitOptions, Config, EvictionPolicy, Item, Prompt};

    /// Blocks 0, 1 hold [1, 2], [3, 4] and are sequence 1's, with a tail; 3, 4 hold the same under a salt, cached.
    fn indexed(policy: EvictionPolicy) -> BlockManager {
        let config = Config::new(8, 2).unwrap().with_prefix_caching(true).with_eviction_policy(policy);
        let mut manager = BlockManager::new(config).unwrap();
        let plain = Prompt::new(&[1, 2, 3, 4, 5]);
        let items = [Item { start: 0, stop: 1, key: "image" }];
        let salted = Prompt { salt: Some("salt"), items: &items, ..plain };
        for (id, prompt) in [(1, &plain), (2, &salted)] {
            manager.admit(id, prompt, &AdmitOptions::default(), &mut Vec::new()).unwrap();
            manager.commit(id, 5).unwrap();
        }
        manager.release_sequence(2).unwrap();
        assert_eq!(manager.check_invariants(), [""; 0]);
        assert_eq!(manager.stats().cached, 2);
        manager
    }

    fn lru() -> BlockManager {
        indexed(EvictionPolicy::Lru)
    }

    fn assert_named(manager: &BlockManager, wanted: &str) {
        let faults = manager.check_invariants();
        assert!(faults.iter().any(|fault| fault.contains(wanted)), "wanted {wanted:?} among {faults:#?}");
    }

    #[test]
    fn nodes_that_are_not_their_content() {
        let mut manager = lru();
        manager.pool.index.tokens[0] = 9;
        assert_named(&manager, "block 0: its hash is not that of its content");
        let mut manager = lru();
        manager.pool.index.nodes[1].parent_id += 77;
        assert_named(&manager, "sequence 1: entry 1 is the node of other content");
        assert_named(&manager, "block 1: indexed, but its parent is not");
        let mut manager = lru();
        manager.pool.index.nodes[1].id = manager.pool.index.nodes[0].id;
        assert_named(&manager, "blocks 0 and 1: both are node");
        let mut manager = lru();
        manager.pool.index.nodes[0].num_children = 2;
        assert_named(&manager, "block 0: 2 children counted, the index has 1");
        let mut manager = lru();
        manager.pool.index.num_nodes += 1;
        assert_named(&manager, "prefix index: 4 nodes, but 5 counted and 4 entries in the table");
        let mut manager = lru();
        manager.pool.index.table.clear();
        assert_named(&manager, "block 1: indexed, but not found by its content");
    }

    #[test]
    fn marks_and_nodes_disagree() {
        let mut manager = lru();
        manager.pool.flags[1] &= !INDEXED;
        assert_named(&manager, "block 1: a node, but not marked as indexed");
        let mut manager = lru();
        manager.pool.flags[2] |= INDEXED;
        assert_named(&manager, "block 2: marked as indexed, but no node");
        let mut manager = lru();
        manager.pool.flags[3] &= !INDEXED;
        assert_named(&manager, "block 3: cached, but not indexed");
    }

    #[test]
    fn chains_that_say_too_much() {
        let mut manager = lru();
        manager.sequences.chains[0].num_indexed = 3;
        assert_named(&manager, "sequence 1: 3 blocks indexed of 5 tokens");
        let mut manager = lru();
        manager.sequences.rows[0].computed = 6;
        assert_named(&manager, "sequence 1: 6 computed of 5 tokens");
        let mut manager = lru();
        manager.sequences.chains[0].num_indexed = 1;
        assert_named(&manager, "sequence 1: entry 1 is indexed, but its chain is not");
    }

    #[test]
    fn counts_of_users() {
        let mut manager = lru();
        manager.pool.index.namespaces.share(1);
        assert_named(&manager, "namespace 1: 2 users counted, 1 found");
        let mut manager = lru();
        manager.pool.index.item_keys.share(1);
        assert_named(&manager, "key 1: 2 users counted, 1 found");
        let mut manager = lru();
        let pin = manager.pin_prefix(&Prompt::new(&[1, 2])).unwrap();
        manager.pins.count_of.insert(0, 2);
        assert_named(&manager, "block 0: 2 pins of callers counted, 1 hold it");
        manager.pins.count_of.clear();
        assert_named(&manager, "counter `pinned`: 0 of 8, but 1 are");
        manager.pins.blocks_of.remove(&pin);
        assert_named(&manager, "block 0: wrong ref count: ref count 2, but 1 holders (sequence 1)");
    }

    #[test]
    fn a_parent_before_its_child() {
        let mut manager = lru();
        let pool = &mut manager.pool;
        pool.cached.remove(&mut pool.links, 4);
        pool.cached.insert(&mut pool.links, 4);
        assert_named(&manager, "block 3: would be evicted before its child 4");
    }

    #[test]
    fn blocks_cached_and_elsewhere() {
        let mut manager = lru();
        let pool = &mut manager.pool;
        pool.cached.insert(&mut pool.links, 0);
        assert_named(&manager, "block 0: in both sets: live and in the order of eviction");
        let mut manager = lru();
        manager.pool.returned.push(3);
        assert_named(&manager, "block 3: in both sets: in the order of eviction and in the free list");
        assert_named(&manager, "block 3: free, but indexed");
    }

    #[test]
    fn segments_and_marks_disagree() {
        let mut manager = indexed(EvictionPolicy::Slru);
        manager.pool.cached.hit(4);
        assert_named(&manager, "block 4: on probation, but marked as hit");
        assert_named(&manager, "block 4: marked as hit, but its parent 3 is not");
        manager.pool.cached.hit(2);
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
        manager.pool.fences.first_open = 1;
        assert_named(&manager, "block 0: fenced, but no owed copy reads it and its epoch is retired");
        let mut manager = broken;
        let pool = &mut manager.pool;
        pool.fences.list.remove(&mut pool.links, 0);
        pool.fences.list.push_back(&mut pool.links, 0);
        assert_named(&manager, "fenced list: not in the order in which the blocks were freed");
        manager.pool.flags[2] |= TAKEN;
        assert_named(&manager, "block 2: its marks of the fence are wrong");
    }
}

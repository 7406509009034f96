//! The audit of the pool: every block is in exactly one state, and its counts are what a recount says.
//!
//! It trusts nothing: a list may hold any number, links may run in a circle. O(blocks used so far).

use super::{FENCED, HELD, INDEXED, Pool, TAKEN};
use crate::eviction::AuditedPool;
use crate::ids::BlockId;

/// What a recount found of one block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    /// Table entries that name it, pins, and the hold of a caller.
    pub(crate) holders: u32,
    /// Appearances in the free stack.
    pub(crate) returned: u32,
    /// Appearances in the list of fenced blocks.
    pub(crate) fenced: u32,
    /// Appearances in the order of eviction.
    pub(crate) cached: u32,
    /// Owed pairs that read it.
    pub(crate) readers: u32,
}

/// A recount of all blocks that were ever handed out.
#[derive(Clone, Debug)]
pub(crate) struct Recount(Vec<Found>);

impl Recount {
    pub(crate) fn of(&self, block: BlockId) -> Option<&Found> {
        self.0.get(block as usize)
    }

    pub(crate) fn of_mut(&mut self, block: BlockId) -> Option<&mut Found> {
        self.0.get_mut(block as usize)
    }

    /// One holder more; false if the block was never handed out.
    pub(crate) fn hold(&mut self, block: BlockId) -> bool {
        self.of_mut(block).map(|found| found.holders += 1).is_some()
    }
}

impl Pool {
    /// Begins a recount with the pool's lists and the holds of callers; none if nothing can be counted.
    pub(crate) fn recount(&self, faults: &mut Vec<String>) -> Option<Recount> {
        let used = self.first_unused as usize;
        if self.first_unused > self.num_blocks() {
            faults.push(format!("first unused block: {used} of {} blocks", self.num_blocks()));
            return None;
        }
        let mut recount = Recount(vec![Found::default(); used]);
        for (found, flags) in recount.0.iter_mut().zip(&self.flags) {
            found.holders += u32::from(flags & HELD != 0);
        }
        let fenced: Vec<BlockId> = self.fences.list.iter(&self.links).collect();
        let cached = self.cached.order(&self.links);
        let mut count = |name: &str, blocks: &[BlockId], add: fn(&mut Found)| {
            for &block in blocks {
                match recount.of_mut(block) {
                    Some(found) => add(found),
                    None => faults.push(format!("{name}: block {block} was never handed out")),
                }
            }
        };
        count("free list", &self.returned, |found| found.returned += 1);
        count("fenced list", &fenced, |found| found.fenced += 1);
        count("eviction order", &cached, |found| found.cached += 1);
        for (name, found, counted) in [
            ("eviction order", cached.len(), self.cached.len()),
            ("fenced list", fenced.len(), self.fences.len()),
        ] {
            if found != counted as usize {
                faults.push(format!("{name}: {found} blocks linked, {counted} counted"));
            }
        }
        Some(recount)
    }

    /// Compares the blocks with a recount that is complete. `owners` are the holders of a block in words.
    pub(crate) fn audit(
        &self,
        recount: &Recount,
        owners: impl Fn(BlockId) -> String,
        faults: &mut Vec<String>,
    ) {
        for (block, found) in recount.0.iter().enumerate() {
            self.audit_block(block as BlockId, *found, &owners, faults);
        }
        let live = self.ref_counts.iter().take(recount.0.len()).filter(|&&count| count > 0).count();
        if self.live as usize != live {
            faults.push(format!("counter `live`: {}, but {live} blocks have holders", self.live));
        }
        if self.peak_live < self.live {
            faults
                .push(format!("counter `peak_live`: {}, but {} blocks are live", self.peak_live, self.live));
        }
        let (live, cached) = (self.live, self.cached.len());
        let (fenced, free, all) = (self.num_fenced(), self.num_free(), self.num_blocks());
        if u64::from(live) + u64::from(cached) + u64::from(fenced) + u64::from(free) != u64::from(all) {
            faults.push(format!(
                "counters: {live} live, {cached} cached, {fenced} fenced and {free} free don't sum to {all} blocks"
            ));
        }
        self.audit_fences(faults);
    }

    /// The states of one block exclude one another, and its ref count and readers are what the recount says.
    fn audit_block(
        &self,
        block: BlockId,
        found: Found,
        owners: impl Fn(BlockId) -> String,
        faults: &mut Vec<String>,
    ) {
        let Found { holders, returned, fenced, cached, readers } = found;
        let (ref_count, num_readers) = (self.ref_count(block), self.num_readers[block as usize]);
        if ref_count != holders {
            let kind = if holders > ref_count && holders > 1 { "double owner" } else { "wrong ref count" };
            let owners = owners(block);
            faults
                .push(format!("block {block}: {kind}: ref count {ref_count}, but {holders} holders{owners}"));
        }
        if num_readers != readers {
            faults.push(format!("block {block}: {num_readers} readers, but {readers} owed copies read it"));
        }
        let places = [
            (ref_count > 0 || holders > 0, "live"),
            (fenced > 0, "fenced"),
            (cached > 0, "in the order of eviction"),
            (returned > 0, "in the free list"),
        ];
        let mut there = places.iter().filter(|(is_there, _)| *is_there).map(|&(_, name)| name);
        match (there.next(), there.next()) {
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
        if fenced > 0 && readers == 0 && self.fences.is_retired(block) {
            let epoch = if self.fences.are_on() { " and its epoch is retired" } else { "" };
            faults.push(format!("block {block}: fenced, but no owed copy reads it{epoch}"));
        }
        if self.has(block, FENCED) != (fenced > 0) || (self.has(block, TAKEN) && fenced == 0) {
            faults.push(format!("block {block}: its marks of the fence are wrong"));
        }
        if cached > 0 && !self.has(block, INDEXED) {
            faults.push(format!("block {block}: cached, but not indexed"));
        }
        if returned > 0 && self.has(block, INDEXED) {
            faults.push(format!("block {block}: free, but indexed"));
        }
    }

    /// Along the fenced list the epochs never fall, copy sources that were taken later aside.
    fn audit_fences(&self, faults: &mut Vec<String>) {
        let fences = &self.fences;
        if fences.first_open > fences.current {
            faults.push(format!("epochs: {} retired, {} is open", fences.first_open, fences.current));
        }
        let blocks = fences.list.iter(&self.links).filter(|&block| block < self.first_unused);
        let ages: Vec<u32> =
            blocks.filter(|&block| !self.has(block, TAKEN)).map(|block| fences.age(block)).collect();
        if !ages.is_sorted_by(|earlier, later| earlier >= later) {
            faults.push("fenced list: not in the order in which the blocks were freed".to_owned());
        }
    }

    /// Nodes are marked and what their content says, and no block is evicted before its children: they stand before it,
    /// and none of them is elsewhere without a holder.
    pub(crate) fn audit_nodes(&self, faults: &mut Vec<String>) {
        self.index.audit(self.first_unused, |block| self.has(block, INDEXED), faults);
        let order = self.cached.order(&self.links);
        let mut rank = vec![None; self.ref_counts.len()];
        for (place, &block) in order.iter().enumerate() {
            rank[block as usize] = Some(place);
        }
        let parents: Vec<(BlockId, BlockId)> = self.index.links().collect();
        for &(block, parent) in &parents {
            let Some(parent_rank) = rank.get(parent as usize).copied().flatten() else { continue };
            if rank[block as usize].is_none_or(|rank| rank > parent_rank) {
                faults.push(format!("block {parent}: would be evicted before its child {block}"));
            }
        }
        let is_indexed = |block| self.has(block, INDEXED);
        let pool = AuditedPool {
            links: &self.links,
            used: self.first_unused,
            is_indexed: &is_indexed,
            parents: &parents,
        };
        self.cached.audit(&pool, faults);
    }

    /// Whether `block` was ever handed out.
    pub(crate) fn has_used(&self, block: BlockId) -> bool {
        block < self.first_unused
    }
}

/// What [`Pool::plant`] breaks.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Planted {
    Held(BlockId),
    Returned(BlockId),
    NothingReturned,
    RefCount(BlockId, u32),
    NoReader(BlockId),
    FencedAgain(BlockId),
    FencedLast(BlockId),
    Live,
    PeakLive,
    Indexed(BlockId, bool),
    Cached(BlockId),
    CachedLast(BlockId),
    FirstOpen(u64),
    Taken(BlockId),
}

#[cfg(test)]
impl Pool {
    /// Breaks something, for the tests of the audit.
    pub(crate) fn plant(&mut self, fault: Planted) {
        let links = &mut self.links;
        match fault {
            Planted::Held(block) => self.flags[block as usize] |= HELD,
            Planted::Returned(block) => self.returned.push(block),
            Planted::NothingReturned => self.returned.clear(),
            Planted::RefCount(block, count) => self.ref_counts[block as usize] = count,
            Planted::NoReader(block) => self.num_readers[block as usize] = 0,
            Planted::FencedAgain(block) => self.fences.list.push_back(links, block),
            Planted::FencedLast(block) => {
                self.fences.list.remove(links, block);
                self.fences.list.push_back(links, block);
            }
            Planted::Live => self.live += 1,
            Planted::PeakLive => self.peak_live = 1,
            Planted::Indexed(block, true) => self.flags[block as usize] |= INDEXED,
            Planted::Indexed(block, false) => self.flags[block as usize] &= !INDEXED,
            Planted::Cached(block) => self.cached.insert(links, block),
            Planted::CachedLast(block) => {
                self.cached.remove(links, block);
                self.cached.insert(links, block);
            }
            Planted::FirstOpen(epoch) => self.fences.first_open = epoch,
            Planted::Taken(block) => self.flags[block as usize] |= TAKEN,
        }
    }
}

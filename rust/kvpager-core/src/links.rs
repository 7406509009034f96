//! Doubly linked lists of block ids, threaded through one array that all lists share. A block is in at most one list
//! at a time (the ledger's when it is the destination of an owed copy, the fenced one when it has no holder left), so
//! one pair of links per block serves all of them. Every operation is O(1) and allocates nothing.

use crate::ids::BlockId;

/// No block: the end of a list.
const END: u32 = u32::MAX;

/// The links of every block. Entries of blocks that are in no list mean nothing.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    /// Of each block: the one before it and the one behind it.
    pairs: Vec<[u32; 2]>,
}

const PREVIOUS: usize = 0;
const NEXT: usize = 1;

impl Links {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self { pairs: vec![[0; 2]; num_blocks as usize] }
    }
}

/// One list, oldest first.
#[derive(Clone, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl List {
    pub(crate) const fn new() -> Self {
        Self { first: END, last: END, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    #[inline]
    pub(crate) fn push_back(&mut self, links: &mut Links, block: BlockId) {
        links.pairs[block as usize] = [self.last, END];
        match self.last {
            END => self.first = block,
            last => links.pairs[last as usize][NEXT] = block,
        }
        self.last = block;
        self.len += 1;
    }

    /// Takes `block`, which must be in this list, out of it.
    #[inline]
    pub(crate) fn remove(&mut self, links: &mut Links, block: BlockId) {
        let [previous, next] = links.pairs[block as usize];
        match previous {
            END => self.first = next,
            previous => links.pairs[previous as usize][NEXT] = next,
        }
        match next {
            END => self.last = previous,
            next => links.pairs[next as usize][PREVIOUS] = previous,
        }
        self.len -= 1;
    }

    pub(crate) fn first(&self) -> Option<BlockId> {
        (self.first != END).then_some(self.first)
    }

    /// The block behind one that is in a list.
    pub(crate) fn after(links: &Links, block: BlockId) -> Option<BlockId> {
        Some(links.pairs[block as usize][NEXT]).filter(|&next| next != END)
    }

    #[inline]
    pub(crate) fn pop_front(&mut self, links: &mut Links) -> Option<BlockId> {
        if self.first == END {
            return None;
        }
        let block = self.first;
        self.remove(links, block);
        Some(block)
    }

    /// The blocks, oldest first. Ends after `len` blocks even where the links run in a circle: the audit reads
    /// lists that may be broken.
    pub(crate) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = BlockId> + use<'a> {
        let mut at = self.first;
        (0..self.len).map_while(move |_| {
            let block = at;
            at = links.pairs.get(block as usize)?[NEXT];
            Some(block)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_survives_removals_anywhere() {
        let mut links = Links::new(5);
        let mut list = List::new();
        for block in [3, 0, 4, 1, 2] {
            list.push_back(&mut links, block);
        }
        list.remove(&mut links, 4); // middle
        list.remove(&mut links, 3); // first
        list.remove(&mut links, 2); // last
        assert_eq!(list.iter(&links).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(list.pop_front(&mut links), Some(0));
        assert_eq!(list.pop_front(&mut links), Some(1));
        assert_eq!(list.pop_front(&mut links), None);
        assert_eq!(list.len(), 0);
        list.push_back(&mut links, 4);
        assert_eq!(list.iter(&links).collect::<Vec<_>>(), [4]);
    }
}

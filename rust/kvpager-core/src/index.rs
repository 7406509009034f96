//! The prefix index: which cached content lies in which block. Exact, whatever the hash does.
//!
//! A node is a block: its parent (the node of the block before it, or the root of a namespace), its S token ids and its
//! extra keys. A hit compares all of them; the 128-bit chain hash only finds the candidate, through the
//! [table](Table).
//!
//! Invariants:
//! * ids of nodes and of namespaces come from one counter and are never used again, so a child can't be reached through
//!   a parent that was dropped and replaced;
//! * a node's parent is in the index as long as it is: only nodes without children are dropped (a whole reset aside);
//! * `num_children` of a node counts the nodes that name it as their parent, `num_users` of a namespace the first blocks
//!   and the sequences in it;
//! * the tokens of block b are `tokens[b·S..][..S]`, there before it enters; of a block that is not in the index yet,
//!   they are its holder's (see `direct`).
//!
//! Costs: find and insert O(S) and one or two cache misses, remove O(1); nothing is allocated after creation but for
//! new keys. 59 bytes a block, and 4·S for the tokens.

use crate::hash::{Hash, Hasher};
use crate::keys::{Interner, NO_KEY};
pub(crate) use crate::table::Gap;
use crate::table::{self, Table};
use crate::{BlockId, Config, TokenId};

/// Bytes of bookkeeping for each block, without its tokens: the node and its share of the table.
pub(crate) const BYTES_PER_BLOCK: usize = size_of::<Node>() + table::BYTES_PER_BLOCK;

/// Blocks that are hashed before the first of them is looked up.
pub(crate) const AHEAD: usize = 64;

/// Nodes that are made vacant at once where blocks have never been indexed.
const GROWTH: usize = 64;

/// Marks a parent that is a namespace, not a block (whose ids have 31 bits).
const NAMESPACE: u32 = 1 << 31;

/// The id of the namespace without salt and adapter.
const DEFAULT_ROOT: u64 = 1;

/// What the index knows of a block.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) hash: Hash,
    /// Never used again; 0 says that the block is not in the index.
    pub(crate) id: u64,
    pub(crate) parent_id: u64,
    /// The parent's block, or [`NAMESPACE`] and the slot of the namespace.
    pub(crate) parent_place: u32,
    pub(crate) num_children: u32,
    /// Slot of the extra keys.
    pub(crate) key: u32,
}

impl Node {
    /// The block of the parent, unless it is the root of a namespace.
    pub(crate) fn parent_block(&self) -> Option<BlockId> {
        (self.parent_place & NAMESPACE == 0).then_some(self.parent_place)
    }

    /// The namespace that this is a first block of.
    pub(crate) fn namespace(&self) -> Option<u32> {
        (self.parent_place & NAMESPACE != 0).then_some(self.parent_place & !NAMESPACE)
    }

    const VACANT: Self =
        Self { hash: [0, 0], id: 0, parent_id: 0, parent_place: 0, num_children: 0, key: NO_KEY };
}

/// Where a chain stands: the node that the next block would be a child of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parent {
    pub(crate) hash: Hash,
    id: u64,
    place: u32,
}

impl Parent {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

/// See the module header. Without prefix caching all arrays are empty.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    /// As far as blocks have been indexed; later ones are vacant.
    pub(crate) nodes: Vec<Node>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) table: Table,
    block_size: usize,
    pub(crate) num_nodes: u32,
    next_id: u64,
    pub(crate) hasher: Hasher,
    pub(crate) namespaces: Interner,
    pub(crate) item_keys: Interner,
}

impl Index {
    /// The caller has found that there is memory.
    pub(crate) fn new(config: &Config) -> Self {
        let num_blocks = if config.prefix_caching() { config.num_blocks() as usize } else { 0 };
        let block_size = if num_blocks > 0 { config.block_size() as usize } else { 0 };
        let hasher = Hasher::new(config.hash_seed(), config.has_constant_hash());
        Self {
            nodes: Vec::with_capacity(num_blocks),
            tokens: vec![0; num_blocks * block_size],
            table: Table::new(num_blocks),
            block_size,
            num_nodes: 0,
            next_id: DEFAULT_ROOT + 1,
            hasher,
            namespaces: Interner::new(hasher.bytes(b""), DEFAULT_ROOT),
            item_keys: Interner::new([0, 0], 0),
        }
    }

    /// The root of a namespace in use.
    #[inline]
    pub(crate) fn root(&self, namespace: u32) -> Parent {
        let entry = &self.namespaces.entries[namespace as usize];
        Parent { hash: entry.hash, id: entry.id, place: NAMESPACE | namespace }
    }

    /// An indexed block as a parent.
    #[inline]
    pub(crate) fn parent(&self, block: BlockId) -> Parent {
        let node = &self.nodes[block as usize];
        Parent { hash: node.hash, id: node.id, place: block }
    }

    /// The chain hash of a block under `parent`, whose extra keys have the hash `key`.
    #[inline]
    pub(crate) fn chain(&self, parent: &Parent, token_ids: &[TokenId], key: Hash) -> Hash {
        self.hasher.chain(parent.hash, token_ids, key)
    }

    /// The chain hashes of up to [`AHEAD`] blocks without extra keys, which are to be kept for `blocks`; how many. Then what
    /// finding and inserting them will touch is looked at, all in one go, so that the cache misses run side by side
    /// instead of one after the other.
    pub(crate) fn chain_ahead(
        &self,
        parent: &Parent,
        token_ids: &[TokenId],
        blocks: &[BlockId],
        hashes: &mut Vec<Hash>,
    ) {
        hashes.clear();
        let mut hash = parent.hash;
        hashes.extend(token_ids.chunks_exact(self.block_size).take(AHEAD).map(|block| {
            hash = self.hasher.chain(hash, block, [0, 0]);
            hash
        }));
        let looked_at = hashes.iter().zip(blocks).fold(0, |seen, (&hash, &block)| {
            seen ^ self.table.look_at(hash) ^ self.tokens[block as usize * self.block_size]
        });
        std::hint::black_box(looked_at);
    }

    /// Reads the entry of an indexed block, or one near it; it means nothing.
    #[inline]
    pub(crate) fn look_at(&self, block: BlockId) -> u32 {
        self.table.look_at(self.nodes[block as usize].hash)
    }

    /// Reads the place that a content with this hash has or would get; it means nothing.
    #[inline]
    pub(crate) fn look_before_insert(&self, hash: Hash) -> u32 {
        self.table.look_at(hash)
    }

    #[inline]
    pub(crate) fn is_leaf(&self, block: BlockId) -> bool {
        self.nodes[block as usize].num_children == 0
    }

    pub(crate) fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        &self.tokens[block as usize * self.block_size..][..self.block_size]
    }

    #[inline]
    pub(crate) fn tokens_mut(&mut self, block: BlockId) -> &mut [TokenId] {
        &mut self.tokens[block as usize * self.block_size..][..self.block_size]
    }

    /// The block that holds exactly this content after exactly this parent, or where its node would go.
    #[inline]
    pub(crate) fn find(
        &self,
        parent: &Parent,
        hash: Hash,
        token_ids: &[TokenId],
        key: u32,
    ) -> Result<BlockId, Gap> {
        // Equal contents under one parent have equal hashes: no need to compare those too.
        self.table.find(hash, |block| {
            let node = &self.nodes[block as usize];
            node.parent_id == parent.id && node.key == key && self.tokens_of(block) == token_ids
        })
    }

    /// Makes room for the node of a block and some behind it.
    #[cold]
    fn grow(&mut self, at: usize) {
        let len = (at + GROWTH).min(self.nodes.capacity());
        self.nodes.resize(len.max(at + 1), Node::VACANT);
    }

    /// Makes `block`, whose tokens are in their place, a node at a gap that [`find`](Self::find) has just found for the
    /// same content. A user of the key `key` is handed over with it.
    #[expect(
        clippy::inline_always,
        reason = "half of its cost would be the call, which hands everything through memory"
    )]
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        gap: Gap,
        block: BlockId,
        parent: &Parent,
        hash: Hash,
        key: u32,
    ) -> Parent {
        let at = block as usize;
        if parent.place & NAMESPACE == 0 {
            self.nodes[parent.place as usize].num_children += 1;
        } else {
            self.namespaces.share(parent.place & !NAMESPACE);
        }
        let id = self.next_id;
        self.next_id += 1;
        let node = Node { hash, id, parent_id: parent.id, parent_place: parent.place, num_children: 0, key };
        if at >= self.nodes.len() {
            self.grow(at);
        }
        self.nodes[at] = node;
        self.table.insert(gap, hash, block);
        self.num_nodes += 1;
        Parent { hash, id, place: block }
    }

    /// Drops the node of `block`, which has no children.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Node { hash, parent_place, num_children, key, .. } =
            std::mem::replace(&mut self.nodes[block as usize], Node::VACANT);
        debug_assert_eq!(num_children, 0, "block {block} has children");
        if parent_place & NAMESPACE == 0 {
            self.nodes[parent_place as usize].num_children -= 1;
        } else {
            self.namespaces.release(parent_place & !NAMESPACE);
        }
        self.item_keys.release(key);
        self.num_nodes -= 1;
        self.table.remove(hash, block);
    }

    /// Drops every node; `num_users` of namespaces and keys fall accordingly. O(nodes ever made + table).
    pub(crate) fn clear(&mut self) {
        for node in &mut self.nodes {
            if node.id == 0 {
                continue;
            }
            if node.parent_place & NAMESPACE != 0 {
                self.namespaces.release(node.parent_place & !NAMESPACE);
            }
            self.item_keys.release(node.key);
            *node = Node::VACANT;
        }
        self.table.clear();
        self.num_nodes = 0;
    }

    /// The slot of a namespace, with one user more.
    pub(crate) fn acquire_namespace(&mut self, bytes: &[u8]) -> u32 {
        if bytes.is_empty() {
            return NO_KEY;
        }
        self.namespaces.acquire(self.hasher.bytes(bytes), bytes, &mut self.next_id)
    }

    /// The slot of a namespace, if any sequence or node is in it.
    pub(crate) fn find_namespace(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.is_empty() { Some(NO_KEY) } else { self.namespaces.find(self.hasher.bytes(bytes), bytes) }
    }

    /// The slot and hash of a block's extra keys, with one user more.
    pub(crate) fn acquire_key(&mut self, bytes: &[u8]) -> (u32, Hash) {
        if bytes.is_empty() {
            return (NO_KEY, [0, 0]);
        }
        let hash = self.hasher.bytes(bytes);
        (self.item_keys.acquire(hash, bytes, &mut self.next_id), hash)
    }

    /// The slot and hash of a block's extra keys, if a node has them.
    pub(crate) fn find_key(&self, bytes: &[u8]) -> Option<(u32, Hash)> {
        if bytes.is_empty() {
            return Some((NO_KEY, [0, 0]));
        }
        let hash = self.hasher.bytes(bytes);
        Some((self.item_keys.find(hash, bytes)?, hash))
    }

    /// A node's parent, if it is in the index under the id that the node names; for the audit.
    pub(crate) fn audited_parent(&self, node: &Node) -> Option<Parent> {
        let parent = match (node.parent_block(), node.namespace()) {
            (Some(block), _) if (block as usize) < self.nodes.len() => self.parent(block),
            (_, Some(slot)) if (slot as usize) < self.namespaces.entries.len() => self.root(slot),
            _ => return None,
        };
        (parent.id == node.parent_id && parent.id != 0).then_some(parent)
    }

    /// The hash of a block's node, 0 if it has none; for the audit.
    pub(crate) fn hash_of(&self, block: BlockId) -> Hash {
        self.nodes.get(block as usize).map_or([0, 0], |node| node.hash)
    }

    /// The hash of an interned key.
    pub(crate) fn key_hash(&self, key: u32) -> Hash {
        self.item_keys.entries.get(key as usize).map_or([0, 0], |entry| entry.hash)
    }
}

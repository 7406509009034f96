//! The prefix index: which cached content lies in which block. Exact, whatever the hash does.
//!
//! A node is a block: its parent (the node of the block before it, or the root of a namespace), its S token ids and its
//! extra keys. A hit compares all of them; the 128-bit chain hash only finds the candidate, through the
//! [buckets](Buckets).
//!
//! Invariants:
//! * ids of nodes and of namespaces come from one counter and are never used again, so a child can't be reached through
//!   a parent that was dropped and replaced;
//! * a node's parent is in the index as long as it is: only nodes without children are dropped (a whole reset aside);
//! * `num_children` of a node counts the nodes that name it as their parent, `num_users` of a namespace the first
//!   blocks and the sequences in it;
//! * the tokens of an indexed block b are `tokens[b·S..][..S]`.
//!
//! Costs: find and insert O(S) and one or two cache misses, remove O(1); nothing is allocated after creation but for
//! new keys. 59 bytes a block, and 4·S for the tokens.

mod audit;
mod buckets;
mod hash;
mod keys;

#[cfg(test)]
pub(crate) use audit::PlantedFault;
use buckets::Buckets;
pub(crate) use buckets::Gap;
pub(crate) use hash::Hash;
use hash::Hasher;
pub(crate) use keys::NO_KEY;
use keys::{Interner, encode_items, encode_namespace};

use crate::config::Config;
use crate::ids::{BlockId, TokenId};
use crate::prompt::Item;

/// Bytes of bookkeeping for each block, without its tokens: the node and its share of the table.
pub(crate) const BYTES_PER_BLOCK: usize = size_of::<Node>() + buckets::BYTES_PER_BLOCK;

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
struct Node {
    hash: Hash,
    /// Never used again; 0 says that the block is not in the index.
    id: u64,
    parent_id: u64,
    /// The parent's block, or [`NAMESPACE`] and the id of the namespace's key.
    parent_place: u32,
    num_children: u32,
    /// Id of the extra keys.
    key_id: u32,
}

impl Node {
    /// The block of the parent, unless it is the root of a namespace.
    fn parent_block(&self) -> Option<BlockId> {
        (self.parent_place & NAMESPACE == 0).then_some(self.parent_place)
    }

    /// The namespace that this is a first block of.
    fn namespace(&self) -> Option<u32> {
        (self.parent_place & NAMESPACE != 0).then_some(self.parent_place & !NAMESPACE)
    }

    const VACANT: Self =
        Self { hash: [0, 0], id: 0, parent_id: 0, parent_place: 0, num_children: 0, key_id: NO_KEY };
}

/// Where a chain stands: the node that the next block would be a child of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parent {
    hash: Hash,
    id: u64,
    place: u32,
}

impl Parent {
    /// The block of the node, unless it is the root of a namespace.
    #[inline]
    pub(crate) fn block(&self) -> Option<BlockId> {
        (self.place & NAMESPACE == 0).then_some(self.place)
    }
}

/// What a block says: where it stands, its tokens and their chain hash, and its extra keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content<'a> {
    pub(crate) parent: Parent,
    pub(crate) hash: Hash,
    pub(crate) token_ids: &'a [TokenId],
    pub(crate) key_id: u32,
}

/// See the module header. Without prefix caching all arrays are empty.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    /// As far as blocks have been indexed; later ones are vacant.
    nodes: Vec<Node>,
    tokens: Vec<TokenId>,
    buckets: Buckets,
    block_size: usize,
    num_nodes: u32,
    next_id: u64,
    hasher: Hasher,
    namespaces: Interner,
    item_keys: Interner,
    /// Memory for an encoded key.
    bytes: Vec<u8>,
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
            buckets: Buckets::new(num_blocks),
            block_size,
            num_nodes: 0,
            next_id: DEFAULT_ROOT + 1,
            hasher,
            namespaces: Interner::new(hasher.bytes(b""), DEFAULT_ROOT),
            item_keys: Interner::new([0, 0], 0),
            bytes: Vec::new(),
        }
    }

    /// Blocks that have a node.
    pub(crate) fn num_nodes(&self) -> u32 {
        self.num_nodes
    }

    /// The root of a namespace in use.
    #[inline]
    pub(crate) fn root(&self, namespace: u32) -> Parent {
        let (hash, id) = self.namespaces.name(namespace);
        Parent { hash, id, place: NAMESPACE | namespace }
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

    /// The chain hashes of up to [`AHEAD`] blocks without extra keys, which are to be kept for `blocks`; how many. Then
    /// what finding and inserting them will touch is looked at, all in one go, so that the cache misses run side by
    /// side instead of one after the other.
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
            seen ^ self.buckets.look_at(hash) ^ self.tokens[block as usize * self.block_size]
        });
        std::hint::black_box(looked_at);
    }

    /// Prefetch: touches the bucket of an indexed block. The value is to be ignored.
    #[inline]
    pub(crate) fn look_at(&self, block: BlockId) -> u32 {
        self.buckets.look_at(self.nodes[block as usize].hash)
    }

    #[inline]
    pub(crate) fn is_leaf(&self, block: BlockId) -> bool {
        self.nodes[block as usize].num_children == 0
    }

    pub(crate) fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        &self.tokens[block as usize * self.block_size..][..self.block_size]
    }

    /// The block that holds exactly this content, or where its node would go.
    #[inline]
    pub(crate) fn find(&self, content: &Content<'_>) -> Result<BlockId, Gap> {
        // Equal contents under one parent have equal hashes: no need to compare those too.
        self.buckets.find(content.hash, |block| {
            let node = &self.nodes[block as usize];
            node.parent_id == content.parent.id
                && node.key_id == content.key_id
                && self.tokens_of(block) == content.token_ids
        })
    }

    /// Makes room for the node of a block and some behind it.
    #[cold]
    fn grow(&mut self, at: usize) {
        let len = (at + GROWTH).min(self.nodes.capacity());
        self.nodes.resize(len.max(at + 1), Node::VACANT);
    }

    /// Makes `block` a node at a gap that [`find`](Self::find) has just found for the same content. A user of the key
    /// is handed over with it.
    #[inline]
    pub(crate) fn insert(&mut self, gap: Gap, block: BlockId, content: &Content<'_>) -> Parent {
        let &Content { parent, hash, token_ids, key_id } = content;
        let at = block as usize;
        self.tokens[at * self.block_size..][..self.block_size].copy_from_slice(token_ids);
        if parent.place & NAMESPACE == 0 {
            self.nodes[parent.place as usize].num_children += 1;
        } else {
            self.namespaces.share(parent.place & !NAMESPACE);
        }
        let id = self.next_id;
        self.next_id += 1;
        if at >= self.nodes.len() {
            self.grow(at);
        }
        self.nodes[at] =
            Node { hash, id, parent_id: parent.id, parent_place: parent.place, num_children: 0, key_id };
        self.buckets.insert(gap, hash, block);
        self.num_nodes += 1;
        Parent { hash, id, place: block }
    }

    /// Drops the node of `block`, which has no children.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let node = std::mem::replace(&mut self.nodes[block as usize], Node::VACANT);
        debug_assert_eq!(node.num_children, 0, "block {block} has children");
        match node.parent_block() {
            Some(parent) => self.nodes[parent as usize].num_children -= 1,
            None => self.namespaces.release(node.parent_place & !NAMESPACE),
        }
        self.item_keys.release(node.key_id);
        self.num_nodes -= 1;
        self.buckets.remove(node.hash, block);
    }

    /// Drops every node; `num_users` of namespaces and keys fall accordingly. O(nodes ever made + buckets).
    pub(crate) fn clear(&mut self) {
        for node in self.nodes.iter_mut().filter(|node| node.id != 0) {
            if let Some(namespace) = node.namespace() {
                self.namespaces.release(namespace);
            }
            self.item_keys.release(node.key_id);
            *node = Node::VACANT;
        }
        self.buckets.clear();
        self.num_nodes = 0;
    }

    // ---- keys ------------------------------------------------------------------------------------------------------

    /// The namespace of a salt and an adapter, with one user more.
    pub(crate) fn acquire_namespace(&mut self, salt: Option<&str>, adapter: Option<&str>) -> u32 {
        encode_namespace(salt, adapter, &mut self.bytes);
        if self.bytes.is_empty() {
            return NO_KEY;
        }
        self.namespaces.acquire(self.hasher.bytes(&self.bytes), &self.bytes, &mut self.next_id)
    }

    /// The namespace of a salt and an adapter, if any sequence or node is in it.
    pub(crate) fn find_namespace(&mut self, salt: Option<&str>, adapter: Option<&str>) -> Option<u32> {
        encode_namespace(salt, adapter, &mut self.bytes);
        if self.bytes.is_empty() {
            return Some(NO_KEY);
        }
        self.namespaces.find(self.hasher.bytes(&self.bytes), &self.bytes)
    }

    /// One user more of a namespace.
    pub(crate) fn share_namespace(&mut self, namespace: u32) {
        self.namespaces.share(namespace);
    }

    /// One user of a namespace fewer.
    pub(crate) fn release_namespace(&mut self, namespace: u32) {
        self.namespaces.release(namespace);
    }

    /// Id and hash of the extra keys of the block at `start`, which these items overlap, with one user more.
    pub(crate) fn acquire_key<'a>(
        &mut self,
        items: impl Iterator<Item = Item<'a>>,
        start: u64,
    ) -> (u32, Hash) {
        encode_items(items, start, &mut self.bytes);
        if self.bytes.is_empty() {
            return (NO_KEY, [0, 0]);
        }
        let hash = self.hasher.bytes(&self.bytes);
        (self.item_keys.acquire(hash, &self.bytes, &mut self.next_id), hash)
    }

    /// The same, if a node has these keys, without a further user.
    pub(crate) fn find_key<'a>(
        &mut self,
        items: impl Iterator<Item = Item<'a>>,
        start: u64,
    ) -> Option<(u32, Hash)> {
        encode_items(items, start, &mut self.bytes);
        if self.bytes.is_empty() {
            return Some((NO_KEY, [0, 0]));
        }
        let hash = self.hasher.bytes(&self.bytes);
        Some((self.item_keys.find(hash, &self.bytes)?, hash))
    }

    /// One user of extra keys fewer.
    pub(crate) fn release_key(&mut self, key_id: u32) {
        self.item_keys.release(key_id);
    }
}

//! The audit of the index: every node is what its content says, can be found by it, and counts its children.
//!
//! O(S · nodes); trusts no count and no link.

use std::collections::HashMap;

use super::{Content, Index, Node, Parent};
use crate::ids::{BlockId, TokenId};

/// A node as the audit of a sequence's chain wants to see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AuditedNode<'a> {
    pub(crate) id: u64,
    pub(crate) parent_id: u64,
    pub(crate) token_ids: &'a [TokenId],
}

impl Index {
    /// The nodes that there are, by block.
    fn nodes(&self) -> impl Iterator<Item = (BlockId, &Node)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter(|(_, node)| node.id != 0).map(|(block, node)| (block as BlockId, node))
    }

    /// Every indexed block whose parent is a block, and that parent.
    pub(crate) fn links(&self) -> impl Iterator<Item = (BlockId, BlockId)> {
        self.nodes().filter_map(|(block, node)| Some((block, node.parent_block()?)))
    }

    /// The node of a block, if it has one.
    pub(crate) fn audited_node(&self, block: BlockId) -> Option<AuditedNode<'_>> {
        let node = self.nodes.get(block as usize).filter(|node| node.id != 0)?;
        Some(AuditedNode { id: node.id, parent_id: node.parent_id, token_ids: self.tokens_of(block) })
    }

    /// The id that first blocks of a namespace name as their parent's.
    pub(crate) fn root_id(&self, namespace: u32) -> u64 {
        self.root(namespace).id
    }

    /// A node's parent, if it is in the index under the id that the node names.
    fn audited_parent(&self, node: &Node) -> Option<Parent> {
        let parent = if let Some(block) = node.parent_block() {
            self.nodes.get(block as usize)?;
            self.parent(block)
        } else {
            self.namespaces.audited_name(node.namespace()?)?;
            self.root(node.namespace()?)
        };
        (parent.id == node.parent_id && parent.id != 0).then_some(parent)
    }

    /// Adds a line for each broken node. `is_marked` says whether the pool marks a block as indexed; `used` blocks were
    /// ever handed out.
    pub(crate) fn audit(&self, used: u32, is_marked: impl Fn(BlockId) -> bool, faults: &mut Vec<String>) {
        let mut num_children: HashMap<BlockId, u32> = HashMap::new();
        let mut block_of: HashMap<u64, BlockId> = HashMap::new();
        for (block, node) in self.nodes() {
            if let Some(other) = block_of.insert(node.id, block) {
                faults.push(format!("blocks {other} and {block}: both are node {}", node.id));
            }
            if let Some(parent) = node.parent_block() {
                *num_children.entry(parent).or_default() += 1;
            }
            if block >= used || !is_marked(block) {
                faults.push(format!("block {block}: a node, but not marked as indexed"));
            }
            self.audit_content(block, node, faults);
        }
        for block in (0..used).filter(|&block| is_marked(block) && self.audited_node(block).is_none()) {
            faults.push(format!("block {block}: marked as indexed, but no node"));
        }
        for (block, node) in self.nodes() {
            let found = num_children.get(&block).copied().unwrap_or(0);
            if node.num_children != found {
                let counted = node.num_children;
                faults.push(format!("block {block}: {counted} children counted, the index has {found}"));
            }
        }
        let hash_of = |block: BlockId| self.nodes.get(block as usize).map_or([0, 0], |node| node.hash);
        let (num_entries, miscounted) = self.buckets.recount(hash_of);
        if let Some(bucket) = miscounted {
            faults.push(format!("prefix index: bucket {bucket} counts the entries that passed it wrongly"));
        }
        let num_nodes = self.nodes().count();
        if self.num_nodes as usize != num_nodes || num_entries != num_nodes {
            let counted = self.num_nodes;
            faults.push(format!(
                "prefix index: {num_nodes} nodes, but {counted} counted and {num_entries} entries in the table"
            ));
        }
    }

    fn audit_content(&self, block: BlockId, node: &Node, faults: &mut Vec<String>) {
        let Some(parent) = self.audited_parent(node) else {
            faults.push(format!("block {block}: indexed, but its parent is not"));
            return;
        };
        let (token_ids, key_id) = (self.tokens_of(block), node.key_id);
        let key_hash = self.item_keys.audited_name(key_id).map_or([0, 0], |(hash, _)| hash);
        let hash = self.chain(&parent, token_ids, key_hash);
        if hash != node.hash {
            faults.push(format!("block {block}: its hash is not that of its content"));
        } else if self.find(&Content { parent, hash, token_ids, key_id }).ok() != Some(block) {
            faults.push(format!("block {block}: indexed, but not found by its content"));
        }
    }

    /// Adds a line for each count of users that is wrong. `namespaces` are those of the sequences.
    pub(crate) fn audit_users(&self, namespaces: impl Iterator<Item = u32>, faults: &mut Vec<String>) {
        let mut users: HashMap<u32, u32> = HashMap::new();
        let mut keys: HashMap<u32, u32> = HashMap::new();
        for (_, node) in self.nodes() {
            *keys.entry(node.key_id).or_default() += 1;
        }
        for namespace in namespaces.chain(self.nodes().filter_map(|(_, node)| node.namespace())) {
            *users.entry(namespace).or_default() += 1;
        }
        self.namespaces.audit("namespace", &users, faults);
        self.item_keys.audit("key", &keys, faults);
    }
}

#[cfg(test)]
impl Index {
    /// Breaks something, for the tests of the audit.
    pub(crate) fn plant(&mut self, fault: PlantedFault) {
        match fault {
            PlantedFault::Token(block) => self.tokens[block as usize * self.block_size] = 9,
            PlantedFault::ParentId(block) => self.nodes[block as usize].parent_id += 77,
            PlantedFault::SameId(block, other) => {
                self.nodes[block as usize].id = self.nodes[other as usize].id;
            }
            PlantedFault::NumChildren(block) => self.nodes[block as usize].num_children += 1,
            PlantedFault::NumNodes => self.num_nodes += 1,
            PlantedFault::Buckets => self.buckets.clear(),
            PlantedFault::ItemKeyUser(key_id) => self.item_keys.share(key_id),
        }
    }
}

/// What [`Index::plant`] breaks.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum PlantedFault {
    Token(BlockId),
    ParentId(BlockId),
    SameId(BlockId, BlockId),
    NumChildren(BlockId),
    NumNodes,
    Buckets,
    ItemKeyUser(u32),
}

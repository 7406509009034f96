//! Which cached block goes first when space is needed.
//!
//! A policy orders the cached blocks (indexed, without a holder, not fenced). It is told when a block becomes cached,
//! when a hit takes it out, and when it loses its node; it answers with the next victim. All O(1), through the links
//! that the pool's lists share.
//!
//! Each policy keeps the cached set prefix-closed, that is, a victim never has a child in the index. It rests on what
//! every caller does: a holder of a block holds all blocks before it; blocks are given back last first; and a block
//! leaves the fence no later than its parent (an untaken copy out of it is owed to a sequence that holds the parent).
//! So a child always *enters* before its parent does, and it enters again only after a hit that took the parent too.
//! The header of each policy says how it keeps the rest.
//!
//! A further policy is a file beside `lru` and `slru`, a line in the list below, and its twin in
//! `python/kvpager/reference/eviction.py`: names, settings and tests follow the list.

mod lru;
mod s3fifo;
mod slru;

use lru::Lru;
use s3fifo::S3Fifo;
use slru::Slru;

use crate::ids::{BlockId, TokenId};
use crate::links::Links;

/// What the pool asks of an order of eviction. Every operation is O(1) and allocates nothing.
trait Eviction {
    /// Bytes that the policy keeps for each block of the pool.
    const BYTES_PER_BLOCK: usize;
    /// The policy of an empty pool.
    fn new(num_blocks: u32) -> Self;
    /// `block` has become cached.
    fn insert(&mut self, links: &mut Links, block: BlockId);
    /// A cached `block` is live again, or lost its node.
    fn remove(&mut self, links: &mut Links, block: BlockId);
    /// Takes the next victim out.
    fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId>;
    /// The next victim, or one of the next: those behind it in its list follow it.
    fn first(&self) -> Option<BlockId>;
    /// An admission has matched `block`, which is live now.
    fn hit(&mut self, block: BlockId);
    /// A victim with these tokens has been taken.
    fn evicted(&mut self, _token_ids: &[TokenId]) {}
    /// `block`, which is live, got a node for these tokens below that of `parent`; `None`: it is a first block.
    fn indexed(&mut self, _block: BlockId, _parent: Option<BlockId>, _token_ids: &[TokenId]) {}
    /// `block` has lost its node and is in no list.
    fn forget(&mut self, block: BlockId);
    /// What was evicted before is void.
    fn forget_evicted(&mut self) {}
    /// Cached blocks.
    fn len(&self) -> u32;
    /// The cached blocks, the next victim first. O(cached).
    fn order(&self, links: &Links) -> Vec<BlockId>;
    /// Adds a line for each of the policy's own rules that is broken.
    fn audit(&self, pool: &AuditedPool<'_>, faults: &mut Vec<String>);
}

/// What a policy may see of the pool when it is audited.
pub(crate) struct AuditedPool<'a> {
    pub(crate) links: &'a Links,
    /// Blocks that were ever handed out.
    pub(crate) used: u32,
    pub(crate) is_indexed: &'a dyn Fn(BlockId) -> bool,
    /// Indexed blocks and their parents.
    pub(crate) parents: &'a [(BlockId, BlockId)],
}

/// Makes the list of policies: the public enum, its names, and the enum of their states. `$d` is a dollar sign, for the
/// macro inside.
macro_rules! policies {
    ($d:tt $($(#[$doc:meta])* $policy:ident = $name:literal,)+) => {
        /// Which cached block goes first when space is needed. The first is the default.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EvictionPolicy {
            $($(#[$doc])* $policy,)+
        }

        impl EvictionPolicy {
            /// Every policy, the default first.
            pub const ALL: &'static [Self] = &[$(Self::$policy),+];

            /// Its name in settings. O(1).
            ///
            /// ```
            /// # use kvpager_core::EvictionPolicy;
            /// assert_eq!(EvictionPolicy::default().as_str(), "lru");
            /// ```
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$policy => $name,)+
                }
            }

            /// Bytes that the policy keeps for each block.
            pub(crate) fn bytes_per_block(self) -> usize {
                match self {
                    $(Self::$policy => $policy::BYTES_PER_BLOCK,)+
                }
            }
        }

        /// The policy of a pool. An enum: the choice is one predictable branch on the hot path.
        #[derive(Clone, Debug)]
        pub(crate) enum Policy {
            $($policy($policy),)+
        }

        /// Calls the policy that there is.
        macro_rules! each {
            ($d chosen:expr, $d inner:ident => $d call:expr) => {
                match $d chosen {
                    $(Policy::$policy($d inner) => $d call,)+
                }
            };
        }

        impl Policy {
            pub(crate) fn new(policy: EvictionPolicy, num_blocks: u32) -> Self {
                match policy {
                    $(EvictionPolicy::$policy => Self::$policy($policy::new(num_blocks)),)+
                }
            }
        }
    };
}

policies! { $
    /// The least recently used.
    Lru = "lru",
    /// Segmented LRU: what was never hit goes before what was, so that a scan can't flush the cache.
    Slru = "slru",
    /// S3-FIFO: as SLRU, but what is hit stays by how often, and what comes back soon after it went is kept.
    S3Fifo = "s3fifo",
}

impl Default for EvictionPolicy {
    fn default() -> Self {
        Self::ALL[0]
    }
}

impl std::str::FromStr for EvictionPolicy {
    type Err = String;

    /// The policy of this name, or what was wanted.
    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|policy| policy.as_str() == name);
        found.copied().ok_or_else(|| {
            let mut names: Vec<String> =
                Self::ALL.iter().map(|policy| format!("`{}`", policy.as_str())).collect();
            let last = names.pop().unwrap_or_default();
            format!("{} or {last}", names.join(", "))
        })
    }
}

impl Policy {
    #[inline]
    pub(crate) fn insert(&mut self, links: &mut Links, block: BlockId) {
        each!(self, policy => policy.insert(links, block));
    }

    #[inline]
    pub(crate) fn remove(&mut self, links: &mut Links, block: BlockId) {
        each!(self, policy => policy.remove(links, block));
    }

    #[inline]
    pub(crate) fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId> {
        each!(self, policy => policy.pop_victim(links))
    }

    #[inline]
    pub(crate) fn first(&self) -> Option<BlockId> {
        each!(self, policy => policy.first())
    }

    #[inline]
    pub(crate) fn hit(&mut self, block: BlockId) {
        each!(self, policy => policy.hit(block));
    }

    #[inline]
    pub(crate) fn evicted(&mut self, token_ids: &[TokenId]) {
        each!(self, policy => policy.evicted(token_ids));
    }

    #[inline]
    pub(crate) fn indexed(&mut self, block: BlockId, parent: Option<BlockId>, token_ids: &[TokenId]) {
        each!(self, policy => policy.indexed(block, parent, token_ids));
    }

    pub(crate) fn forget_evicted(&mut self) {
        each!(self, policy => policy.forget_evicted());
    }

    #[inline]
    pub(crate) fn forget(&mut self, block: BlockId) {
        each!(self, policy => policy.forget(block));
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        each!(self, policy => policy.len())
    }

    pub(crate) fn order(&self, links: &Links) -> Vec<BlockId> {
        each!(self, policy => policy.order(links))
    }

    pub(crate) fn audit(&self, pool: &AuditedPool<'_>, faults: &mut Vec<String>) {
        each!(self, policy => policy.audit(pool, faults));
    }
}

#![doc = "The metadata plane of kvpager: who owns which block of a paged key/value cache."]
//!
//! # Design
//!
//! A pool of `N` physical *blocks* holds the keys and values of many sequences; each block has room for `S` token
//! positions. A sequence sees consecutive positions; its *block table* maps `position / S` to a physical block, as a
//! page table maps pages to frames. This crate owns the integers only: no tensor, no device, no Python, no clock.
//!
//! ```text
//!             take: last freed first, then fresh blocks
//!    free ────────────────────────────────────────────────► live ◄───────────────┐ a hit (admission, pin,
//!     ▲ ▲                                                   │  ▲                 │ collapsed duplicate)
//!     │ │                       ref count reaches 0         │  │ evicted: for    │
//!     │ └───────────────────────────────────────────────────┤  │ other content   │
//!     │                     not indexed, nothing touches it │  │                 │
//!     │                                                     ├──┼────────────► cached
//!     │                         indexed, nothing touches it │  │ hit             ▲
//!     │                                                     ▼  │                 │
//!     └────────────────────────────────────────────────── fenced ────────────────┘
//!              the copy out of it is taken or dropped, its epoch is retired: free, or cached if indexed
//! ```
//!
//! * **Structure of arrays.** All a block has is a few `u32` at its index ([`config::Config`] bounds the ids to 31
//!   bits): ref count, pins, two list links, the source of a copy owed into it; with the index a 48-byte node and its
//!   token ids. At most 96 bytes a block, token ids aside. No allocation per block, no pointer, no hash of a block id. A pool of any size is made in O(1) touched memory: blocks never used before are a watermark,
//!   not entries.
//! * **Free list.** A stack: O(1), last freed first, so what was touched last is handed out while it is warm.
//! * **Copy-on-write.** Sharing is by ref count ([`BlockManager::fork_sequence`]). The first writer of a shared tail
//!   gets a block of its own and owes the copy as a `(source, destination)` pair; whoever moves the bytes asks for the
//!   pairs ([`BlockManager::take_copies`]) before the next write. Until then the source is pinned: with no holder left
//!   it is *fenced*, not free.
//! * **Prefix index.** Exact: a node is its parent, its tokens and its extra keys, and a hit compares them; the 128-bit
//!   chain hash only finds the candidate ([`BlockManager::admit`]). Only committed blocks enter
//!   ([`BlockManager::commit`]), duplicates collapse onto the block that is there.
//! * **Eviction.** Cached blocks stay findable until their space is needed; leaves go before their parents, under LRU or
//!   a policy that scans can't flush ([`EvictionPolicy`]).
//! * **Fences.** What work in flight may touch is not handed out ([`BlockManager::retire`]).
//! * **Open runs.** A sequence remembers how many positions of its tail it may write without looking at the pool, so
//!   that an append is one hash, one compare and two additions. Whatever may change the answer (a fork, a rollback)
//!   closes the run; the next append looks again.
//! * **All or nothing.** Each call checks everything and settles its demand for blocks before it changes anything.
//!   After an error the state is the state before, down to the order in which free blocks will be handed out.
//!
//! The modules, lowest first: [`config`] and [`error`] are leaves; `hash` and `keys` name content, `links` are lists
//! threaded through arrays, `eviction` orders what is cached, `index` finds it; `pool` and [its fences](BlockManager::retire)
//! decide the state of a block; `copies` is the ledger of owed pairs; `sequence` is the table of sequences, `chain` what
//! one knows of its tokens; `demand` settles what `append`, [`admission`] and `commit` hand out; `direct` is the commit of a decode step; [`pins`] hold what is cached;
//! [`manager`] is the public face, `lookup`, `figures` and [`info`] its reading half; `audit` and `audit_index` recount
//! everything; [`stats`] are the counters; `batch` shows a persistent batch to kernels.
//!
//! # Example
//!
//! ```
//! use kvpager_core::{BlockManager, Config};
//!
//! let mut manager = BlockManager::new(Config::new(8, 4)?)?;
//! manager.create_sequence(1)?;
//! let mut slots = Vec::new();
//! manager.append_tokens(1, 6, &mut slots)?;
//! assert_eq!(slots, [0, 1, 2, 3, 4, 5]);
//!
//! manager.fork_sequence(1, 2, None)?; // both blocks are shared, the half-full tail too
//! assert_eq!(manager.append_token(2)?, 2 * 4 + 2); // the tail is copied before the write
//! assert_eq!(manager.take_copies(), [(1, 2)]);
//! assert_eq!(manager.block_table(1)?, [0, 1]);
//! assert_eq!(manager.block_table(2)?, [0, 2]);
//! # Ok::<(), kvpager_core::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod admission;
mod append;
mod audit;
mod audit_index;
pub mod batch;
mod chain;
mod commit;
pub mod config;
mod copies;
mod demand;
mod direct;
pub mod error;
mod eviction;
mod fences;
mod figures;
mod hash;
mod index;
pub mod info;
mod keys;
mod links;
mod lookup;
pub mod manager;
pub mod pins;
mod pool;
mod sequence;
pub mod stats;
mod table;

pub use admission::{Admission, AdmitOptions, Item, Prompt};
pub use batch::{BatchBuffers, BatchId, BatchMemory, BatchShape, BatchStep};
pub use config::{Config, EvictionPolicy};
pub use error::{Error, Result};
pub use info::{BlockInfo, BlockState};
pub use manager::BlockManager;
pub use pins::PinId;
pub use stats::Stats;

/// A physical block: an index into the pool, below 2³¹ so that an int32 table can hold it.
pub type BlockId = u32;

/// A token of a vocabulary, 0 to 2³¹ − 1 so that an int32 tensor can hold it.
pub type TokenId = u32;

/// The caller's name of a sequence, at most 2⁶³ − 1 so that an int64 tensor can hold it.
pub type SequenceId = u64;

/// One token position in the pool: `block * block_size + offset`.
pub type Slot = i64;

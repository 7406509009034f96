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
//!   bits): ref count, readers, two list links, the source of a copy owed into it; with the index a 48-byte node and
//!   its token ids. At most 96 bytes a block, token ids aside. No allocation per block, no pointer, no hash of a block
//!   id. A pool of any size is made in O(1) touched memory: blocks never used before are one number, not entries.
//! * **Free list.** A stack: O(1), last freed first, so what was touched last is handed out while it is warm.
//! * **Copy-on-write.** Sharing is by ref count ([`BlockManager::fork_sequence`]). The first writer of a shared tail
//!   gets a block of its own and owes the copy as a `(source, destination)` pair; whoever moves the bytes asks for the
//!   pairs ([`BlockManager::take_copies`]) before the next write. Until then the source has a reader: with no holder
//!   left it is *fenced*, not free.
//! * **Prefix index.** Exact: a node is its parent, its tokens and its extra keys, and a hit compares them; the 128-bit
//!   chain hash only finds the candidate ([`BlockManager::admit`]). Only committed blocks enter
//!   ([`BlockManager::commit`]), duplicates collapse onto the block that is there.
//! * **Eviction.** Cached blocks stay findable until their space is needed; leaves go before their parents, under LRU
//!   or a policy that scans can't flush ([`EvictionPolicy`]).
//! * **Fences.** What work in flight may touch is not handed out ([`BlockManager::retire`]).
//! * **Open runs.** A sequence remembers how many positions of its tail it may write without looking at the pool, so
//!   that an append is one hash, one compare and two additions. Whatever may change the answer (a fork, a rollback)
//!   closes the run; the next append looks again.
//! * **All or nothing.** Each call checks everything and settles its demand for blocks before it changes anything.
//!   After an error the state is the state before, down to the order in which free blocks will be handed out.
//!
//! # Reading order
//!
//! Two floors. An import points downward only; `tests/layers.rs` counts them.
//!
//! *Data structures*, lowest first. Fields are private; a module's methods are all that others can do to its state.
//!
//! 1. [`ids`](BlockId), [`error`], [`info`] and [`stats`] are the words; `links` are lists threaded through arrays;
//!    [`eviction`](EvictionPolicy) orders what is cached; [`config`] is the validated shape; [`prompt`](Prompt) is what
//!    comes in.
//! 2. `index` finds content: `hash` and `keys` name it, `buckets` look it up.
//! 3. `pool` decides the state of each block; its `fences` keep what is in flight.
//! 4. `copies` is the ledger of owed pairs, `pins` the held prefixes, `chain` what a sequence knows of its tokens,
//!    `sequences` their table. `place` opens and copies blocks for writes, `batch` shows a batch to kernels.
//!
//! *Verbs*: [`manager`] is the public face; each group of its methods is a file in its folder.
//!
//! # Example
//!
//! ```
//! use kvpager_core::{BlockManager, Config};
//!
//! let mut manager = BlockManager::new(Config::new(8, 4)?)?;
//! manager.create_sequence(1)?;
//! let mut slots = Vec::new();
//! manager.append_tokens(1, 6, None, &mut slots)?;
//! assert_eq!(slots, [0, 1, 2, 3, 4, 5]);
//!
//! manager.fork_sequence(1, 2, None)?; // both blocks are shared, the half-full tail too
//! assert_eq!(manager.append_token(2, None)?, 2 * 4 + 2); // the tail is copied before the write
//! assert_eq!(manager.take_copies(), [(1, 2)]);
//! assert_eq!(manager.block_table(1)?, [0, 1]);
//! assert_eq!(manager.block_table(2)?, [0, 2]);
//! # Ok::<(), kvpager_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod batch;
mod chain;
pub mod config;
mod copies;
pub mod error;
mod eviction;
mod ids;
mod index;
pub mod info;
mod links;
pub mod manager;
mod pins;
mod place;
mod pool;
mod prompt;
mod sequences;
pub mod stats;

pub use batch::{BatchBuffers, BatchId, BatchMemory, BatchShape, BatchStep};
pub use config::Config;
pub use error::{Error, Result};
pub use eviction::EvictionPolicy;
pub use ids::{BlockId, SequenceId, Slot, TokenId};
pub use info::{BlockInfo, BlockState};
pub use manager::{Admission, AdmitOptions, BatchMut, BlockManager};
pub use pins::PinId;
pub use prompt::{Item, Prompt};
pub use stats::Stats;

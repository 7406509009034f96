//! Interned keys: what makes equal tokens different (salt, adapter, media items) becomes a small number.
//!
//! A key is encoded as bytes so that different keys have different bytes (every field is tagged and has its length in
//! front), and is held as long as a node or a sequence names it. Key 0 is no key at all and is never counted. Every
//! entry has an id that is never used again, under the counter of the index's nodes: a namespace is the root that the
//! first blocks have for a parent.
//!
//! Costs: O(bytes) to find or acquire, O(1) to share or release; entries and their memory are used again, so keys that
//! come and go allocate nothing once warm.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use super::hash::Hash;
use crate::prompt::Item;

/// The id that stands for no key.
pub(crate) const NO_KEY: u32 = 0;

const END: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Entry {
    bytes: Vec<u8>,
    hash: Hash,
    /// Never used again; 0 while vacant.
    id: u64,
    /// Nodes and sequences that name it.
    num_users: u32,
    /// The next entry with the same low word of the hash.
    next: u32,
}

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct Interner {
    first_with: FxHashMap<u64, u32>,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
}

impl Interner {
    /// With key 0 filled: its hash and id are those of no key.
    pub(crate) fn new(hash: Hash, id: u64) -> Self {
        let none = Entry { bytes: Vec::new(), hash, id, num_users: 0, next: END };
        Self { first_with: FxHashMap::default(), entries: vec![none], vacant: Vec::new() }
    }

    /// The id of a key that is in use.
    pub(crate) fn find(&self, hash: Hash, bytes: &[u8]) -> Option<u32> {
        let mut key_id = *self.first_with.get(&hash[0])?;
        while key_id != END {
            let entry = &self.entries[key_id as usize];
            if entry.bytes == bytes {
                return Some(key_id);
            }
            key_id = entry.next;
        }
        None
    }

    /// The id of a key, with one user more; a new one takes its id from `next_id`.
    pub(crate) fn acquire(&mut self, hash: Hash, bytes: &[u8], next_id: &mut u64) -> u32 {
        if let Some(key_id) = self.find(hash, bytes) {
            self.share(key_id);
            return key_id;
        }
        let key_id = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(Entry { bytes: Vec::new(), hash, id: 0, num_users: 0, next: END });
            self.entries.len() as u32 - 1
        });
        let next = self.first_with.insert(hash[0], key_id).unwrap_or(END);
        let entry = &mut self.entries[key_id as usize];
        entry.bytes.extend_from_slice(bytes);
        (entry.hash, entry.id, entry.num_users, entry.next) = (hash, *next_id, 1, next);
        *next_id += 1;
        key_id
    }

    /// One user more of a key in use.
    #[inline]
    pub(crate) fn share(&mut self, key_id: u32) {
        if key_id != NO_KEY {
            self.entries[key_id as usize].num_users += 1;
        }
    }

    /// One user fewer; the last one gone, the key is forgotten.
    #[inline]
    pub(crate) fn release(&mut self, key_id: u32) {
        if key_id == NO_KEY {
            return;
        }
        self.entries[key_id as usize].num_users -= 1;
        if self.entries[key_id as usize].num_users == 0 {
            self.forget(key_id);
        }
    }

    #[cold]
    fn forget(&mut self, key_id: u32) {
        let (word, next) = {
            let entry = &mut self.entries[key_id as usize];
            entry.bytes.clear();
            entry.id = 0;
            (entry.hash[0], entry.next)
        };
        let first = self.first_with.get(&word).copied().unwrap_or(END);
        if first == key_id {
            if next == END {
                self.first_with.remove(&word);
            } else {
                self.first_with.insert(word, next);
            }
        } else {
            let mut at = first;
            while self.entries[at as usize].next != key_id {
                at = self.entries[at as usize].next;
            }
            self.entries[at as usize].next = next;
        }
        self.vacant.push(key_id);
    }

    /// Hash and node id of a key in use.
    #[inline]
    pub(crate) fn name(&self, key_id: u32) -> (Hash, u64) {
        let entry = &self.entries[key_id as usize];
        (entry.hash, entry.id)
    }

    /// The same, if there ever was such a key; for the audit.
    pub(crate) fn audited_name(&self, key_id: u32) -> Option<(Hash, u64)> {
        self.entries.get(key_id as usize).map(|entry| (entry.hash, entry.id))
    }

    /// Says where the counts of users differ from those `found`; for the audit.
    pub(crate) fn audit(&self, kind: &str, found: &HashMap<u32, u32>, faults: &mut Vec<String>) {
        for (key_id, entry) in self.entries.iter().enumerate().skip(1) {
            let found = found.get(&(key_id as u32)).copied().unwrap_or(0);
            if entry.num_users != found {
                faults.push(format!("{kind} {key_id}: {} users counted, {found} found", entry.num_users));
            }
        }
        let in_use = self.entries.iter().skip(1).filter(|entry| entry.num_users > 0).count();
        if self.len() != in_use {
            faults.push(format!("{kind}s: {} counted, {in_use} in use", self.len()));
        }
    }

    /// Keys in use, without key 0.
    fn len(&self) -> usize {
        self.entries.len() - 1 - self.vacant.len()
    }
}

/// Encodes a namespace; empty for none, so that it is key 0.
pub(crate) fn encode_namespace(salt: Option<&str>, adapter: Option<&str>, bytes: &mut Vec<u8>) {
    bytes.clear();
    for (tag, text) in [(b's', salt), (b'a', adapter)] {
        if let Some(text) = text {
            bytes.push(tag);
            encode_text(text, bytes);
        }
    }
}

/// Encodes the items that overlap the block at `start`; empty if none does. Places are relative to the block and not
/// cut to it.
pub(crate) fn encode_items<'a>(items: impl Iterator<Item = Item<'a>>, start: u64, bytes: &mut Vec<u8>) {
    bytes.clear();
    for item in items {
        bytes.push(b'i');
        bytes.extend_from_slice(&(item.start as i64 - start as i64).to_le_bytes());
        bytes.extend_from_slice(&(item.stop as i64 - start as i64).to_le_bytes());
        encode_text(item.key, bytes);
    }
}

fn encode_text(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::overlapping;

    fn namespace(salt: Option<&str>, adapter: Option<&str>) -> Vec<u8> {
        let mut bytes = vec![1, 2, 3];
        encode_namespace(salt, adapter, &mut bytes);
        bytes
    }

    #[test]
    fn b014_fields_are_tagged() {
        let texts = [None, Some(""), Some("a"), Some("b"), Some("ab"), Some("c"), Some("bc"), Some("x")];
        let mut seen = std::collections::HashSet::new();
        for salt in texts {
            for adapter in texts {
                assert!(seen.insert(namespace(salt, adapter)), "{salt:?}, {adapter:?}");
            }
        }
        assert_eq!(namespace(None, None), [0_u8; 0]);
    }

    #[test]
    fn items_count_where_they_overlap() {
        let items = [Item { start: 2, stop: 6, key: "x" }, Item { start: 6, stop: 7, key: "y" }];
        let mut bytes = Vec::new();
        let mut of_block = |block: u64| {
            let overlapping = overlapping(&items, |item| (item.start, item.stop), block * 4, block * 4 + 4);
            encode_items(overlapping.iter().copied(), block * 4, &mut bytes);
            bytes.clone()
        };
        assert!(of_block(0).len() < of_block(1).len());
        assert_eq!(of_block(2), [0_u8; 0]);
    }

    #[test]
    fn ids_and_collisions() {
        let (mut keys, mut next_id) = (Interner::new([0, 0], 1), 2);
        let key_ids: Vec<u32> =
            [b"a", b"b", b"c"].iter().map(|bytes| keys.acquire([9, 9], *bytes, &mut next_id)).collect();
        assert_eq!((key_ids.as_slice(), keys.len(), next_id), ([1, 2, 3].as_slice(), 3, 5));
        assert_eq!(keys.acquire([9, 9], b"b", &mut next_id), 2);
        keys.release(2);
        assert_eq!(keys.find([9, 9], b"b"), Some(2));
        for gone in [2, 3, 1] {
            keys.release(gone);
        }
        assert_eq!((keys.len(), keys.find([9, 9], b"a")), (0, None));
        let again = keys.acquire([9, 9], b"a", &mut next_id);
        assert_eq!((again, keys.entries[again as usize].id), (1, 5)); // the place, but a new node id
        keys.share(NO_KEY);
        keys.release(NO_KEY);
    }
}

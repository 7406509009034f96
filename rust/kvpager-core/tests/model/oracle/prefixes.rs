//! Prefixes in the model: what is found, admitted, committed and pinned.

use std::collections::BTreeSet;

use kvpager_core::{AdmitOptions, BlockId, Error, SequenceId, Slot, TokenId};

use super::{Model, ModelSequence, Namespace, Prefix, Span, Tokens, bad_argument, too_long_error};

impl Model {
    /// The first blocks of these ids as the index names them, as far as they are full and known.
    fn prefix(
        &self,
        namespace: Namespace,
        ids: &[Option<TokenId>],
        items: &[Span],
        num_blocks: usize,
    ) -> Option<Prefix> {
        let size = self.size() as usize;
        let content = |block: usize| {
            let (start, stop) = ((block * size) as u64, ((block + 1) * size) as u64);
            let known: Option<Vec<TokenId>> =
                ids.get(block * size..(block + 1) * size)?.iter().copied().collect();
            let overlapping = items.iter().filter(|item| item.0 < stop && item.1 > start);
            let relative = |item: &Span| (item.0 as i64 - start as i64, item.1 as i64 - start as i64, item.2);
            Some((known?, overlapping.map(relative).collect()))
        };
        Some((namespace, (0..num_blocks).map(content).collect::<Option<_>>()?))
    }

    /// The cached blocks of a prompt within its first `limit` tokens.
    fn find(&self, prompt: &Tokens, limit: u64) -> Vec<BlockId> {
        let ids: Vec<_> = prompt.ids.iter().copied().map(Some).collect();
        let found = |num_blocks: u64| {
            let prefix = self.prefix(prompt.namespace, &ids, &prompt.items, num_blocks as usize);
            self.index.get(&prefix?).copied()
        };
        (1..=limit / self.size()).map_while(found).collect()
    }

    pub(crate) fn match_prefix(&self, prompt: &Tokens) -> u64 {
        self.find(prompt, (prompt.ids.len() as u64).saturating_sub(1)).len() as u64 * self.size()
    }

    /// (computed tokens, slots) of an admission.
    pub(crate) fn plan(
        &self,
        id: SequenceId,
        prompt: &Tokens,
        options: &AdmitOptions,
    ) -> Result<(u64, u64), Error> {
        if self.sequences.contains_key(&id) {
            return Err(Error::DuplicateSequence { sequence_id: id });
        }
        let num_tokens = prompt.ids.len() as u64;
        let total = u64::from(self.config.num_blocks());
        if num_tokens > self.config.max_sequence_length() || num_tokens.div_ceil(self.size()) > total {
            return Err(too_long_error());
        }
        let computed = self.match_prefix(prompt);
        let num_slots = (num_tokens - computed).min(options.num_new_tokens.unwrap_or(u64::MAX));
        let hits = self.find(prompt, num_tokens.saturating_sub(1));
        let watermark = if self.live() == 0 { 0 } else { u64::from(self.config.watermark_blocks()) };
        let watermark = watermark.max(options.reserve_blocks);
        let num_new_blocks = (computed + num_slots).div_ceil(self.size()) - hits.len() as u64;
        let needed = num_new_blocks.saturating_add(watermark);
        let free =
            self.num_available() - hits.iter().filter(|hit| self.cached().contains(hit)).count() as u64;
        if needed > free {
            let fenced = self.fenced.len() as u64;
            return Err(Error::OutOfBlocks { needed, free, fenced, total, row: None, watermark });
        }
        Ok((computed, num_slots))
    }

    pub(crate) fn admit(
        &mut self,
        id: SequenceId,
        prompt: &Tokens,
        options: &AdmitOptions,
    ) -> Result<(u64, Vec<Slot>), Error> {
        let (computed, num_slots) = self.plan(id, prompt, options)?;
        let hits = self.find(prompt, (prompt.ids.len() as u64).saturating_sub(1));
        let ids: Vec<_> = prompt.ids.iter().copied().map(Some).collect();
        let prefix = self.prefix(prompt.namespace, &ids, &prompt.items, hits.len());
        let contents = prefix.map_or_else(Vec::new, |(_, contents)| contents);
        self.sequences.insert(
            id,
            ModelSequence {
                length: computed,
                computed,
                ids,
                namespace: prompt.namespace,
                items: prompt.items.clone(),
                num_indexed: hits.len(),
                contents,
                ..ModelSequence::default()
            },
        );
        for &hit in &hits {
            self.attach(hit);
            self.sequence_mut(id).table.push(hit);
            if !options.resumed {
                self.hit(hit);
            }
        }
        let slots = (0..num_slots).map(|_| self.append_one(id, &BTreeSet::new(), None)).collect();
        if self.config.prefix_caching() {
            if options.resumed {
                self.counted[2] += computed;
            } else {
                self.counted[0] += computed;
                self.counted[1] += prompt.ids.len() as u64;
            }
        }
        Ok((computed, slots))
    }

    /// All rows or none; by trial on a copy.
    pub(crate) fn commit(
        &mut self,
        rows: &[(SequenceId, u64)],
        token_ids: Option<&[TokenId]>,
        argument: &'static str,
    ) -> Result<(), Error> {
        for &(id, _) in rows {
            self.sequence(id)?;
        }
        let mut trial = self.clone();
        let mut unknown = Vec::new();
        for &(id, n) in rows {
            if n < trial.computed(id) || n > trial.sequences[&id].length {
                return Err(bad_argument(argument));
            }
            let sequence = trial.sequence_mut(id);
            sequence.computed = n;
            let num_ids = sequence.ids.len().max(n as usize);
            sequence.ids.resize(num_ids, None);
            for at in (0..n as usize).filter(|&at| sequence.ids[at].is_none()) {
                if !unknown.contains(&(id, at)) {
                    unknown.push((id, at));
                }
            }
        }
        if token_ids.is_some_and(|token_ids| token_ids.len() != unknown.len()) {
            return Err(bad_argument("token_ids"));
        }
        for &(id, n) in rows {
            let sequence = &self.sequences[&id];
            let waits = |column: usize| {
                let block = sequence.table[column];
                self.owed.iter().any(|&(_, destination)| destination == block)
            };
            let (first, behind) = (self.computed(id), n);
            let mut reached = (first..behind).map(|position| (position / self.size()) as usize);
            if self.config.prefix_caching() && reached.any(waits) {
                return Err(Error::State { reason: String::new() });
            }
        }
        let mut next_id = token_ids.unwrap_or_default().iter();
        for &(id, n) in rows {
            let sequence = self.sequence_mut(id);
            let before = std::mem::replace(&mut sequence.computed, n);
            let num_ids = sequence.ids.len().max(if token_ids.is_some() { n as usize } else { 0 });
            sequence.ids.resize(num_ids, None);
            for at in 0..num_ids.min(n as usize) {
                if sequence.ids[at].is_none() {
                    sequence.ids[at] = next_id.next().copied();
                }
            }
            if self.config.prefix_caching() {
                (before / self.size()..n / self.size()).for_each(|logical| self.enter(id, logical as usize));
            }
        }
        Ok(())
    }

    /// Block `logical` of a sequence has become full and committed.
    fn enter(&mut self, id: SequenceId, logical: usize) {
        let sequence = self.sequences[&id].clone();
        let prefix = self.prefix(sequence.namespace, &sequence.ids, &sequence.items, logical + 1);
        let Some(mut prefix) = prefix.filter(|_| sequence.num_indexed == logical && !sequence.is_stale)
        else {
            return;
        };
        prefix.1[..logical].clone_from_slice(&sequence.contents);
        self.sequence_mut(id).contents.clone_from(&prefix.1);
        let own = sequence.table[logical];
        if let Some(&same) = self.index.get(&prefix) {
            self.attach(same);
            self.sequence_mut(id).table[logical] = same;
            self.settle(&[own]);
        } else {
            let parent = logical.checked_sub(1).map(|before| sequence.table[before]);
            self.recall(own, parent, &prefix.1[logical].0);
            self.index.insert(prefix, own);
        }
        self.sequence_mut(id).num_indexed += 1;
    }

    pub(crate) fn pin(&mut self, prompt: &Tokens) -> Result<u64, Error> {
        let blocks = self.find(prompt, prompt.ids.len() as u64);
        let pinned: BTreeSet<BlockId> = self.pins.values().flatten().chain(&blocks).copied().collect();
        if pinned.len() > self.config.max_pinned_blocks() as usize {
            return Err(Error::State { reason: String::new() });
        }
        self.pins.insert(self.next_pin, Vec::new());
        for block in blocks {
            self.attach(block);
            self.pins.get_mut(&self.next_pin).expect("just made").push(block);
        }
        self.next_pin += 1;
        Ok(self.next_pin - 1)
    }

    pub(crate) fn unpin(&mut self, pin: u64) -> Result<(), Error> {
        let mut blocks = self.pins.remove(&pin).ok_or(bad_argument("pin"))?;
        while let Some(block) = blocks.pop() {
            // The pin's other blocks are held until their turn comes.
            self.pins.insert(u64::MAX, blocks.clone());
            self.settle(&[block]);
        }
        self.pins.remove(&u64::MAX);
        Ok(())
    }

    pub(crate) fn retire(&mut self, epoch: u64) -> Result<(), Error> {
        if epoch >= self.epoch {
            return Err(bad_argument("epoch"));
        }
        self.num_retired = self.num_retired.max(epoch + 1);
        self.settle(&[]);
        Ok(())
    }

    pub(crate) fn reset(&mut self) {
        if !self.config.prefix_caching() {
            return;
        }
        for block in self.cached() {
            self.free.insert(0, block);
        }
        self.index.clear();
        self.probation.clear();
        self.protected.clear();
        self.marked.clear();
        self.hits.clear();
        self.ghost.clear();
        for sequence in self.sequences.values_mut() {
            sequence.num_indexed = 0;
            sequence.contents.clear();
            sequence.is_stale |= sequence.length > 0;
        }
    }
}

//! The operations, with arguments from bytes that mostly make sense.

use std::collections::BTreeMap;

use kvpager_core::{AdmitOptions, Item, Prompt, Result, SequenceId, Slot};

use crate::bytes::Bytes;
use crate::engine::{Engine, Text};

/// Ids in use: few, so that they exist or not about equally often.
const NUM_IDS: u64 = 5;
const NUM_TOKENS: u64 = 3;
const NAMES: [Option<&str>; 4] = [None, None, Some(""), Some("a")];

impl Engine {
    /// Takes one operation from the bytes and carries it out.
    pub(crate) fn operate(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        match bytes.below(20) {
            0 => self.create(bytes.below(NUM_IDS)),
            1..=3 => self.admit(bytes),
            4 => self.ask(bytes),
            5 | 6 => self.append(bytes),
            7 => self.append_batch(bytes),
            8..=10 => self.commit(bytes),
            11 => self.release(bytes.below(NUM_IDS)),
            12 => self.truncate(bytes),
            13 => self.fork(bytes),
            14 => {
                self.copy();
                Ok(())
            }
            15 => self.hold(bytes),
            16 => self.pin(bytes),
            17 => self.manager.advance_epoch().map(drop),
            18 => self.manager.retire(bytes.below(4)),
            _ => {
                // Rare: mostly retires what can be retired.
                if bytes.below(8) == 0 {
                    self.manager.reset_prefix_cache();
                    return Ok(());
                }
                let epoch = self.manager.advance_epoch()?;
                self.manager.retire(epoch)
            }
        }
    }

    fn create(&mut self, id: SequenceId) -> Result<()> {
        self.manager.create_sequence(id)?;
        self.texts.insert(id, Text::default());
        Ok(())
    }

    /// A prompt, often one that begins like another sequence.
    fn prompt(&mut self, bytes: &mut Bytes<'_>) -> Text {
        let like = self.texts.get(&bytes.below(2 * NUM_IDS));
        let mut text = like.map_or_else(
            || Text { salt: bytes.pick(&NAMES), adapter: bytes.pick(&NAMES), ..Text::default() },
            |text| text.cut(text.tokens.len() as u64),
        );
        for _ in 0..bytes.below(6) {
            text.tokens.push(bytes.below(NUM_TOKENS) as u32);
        }
        let length = text.tokens.len() as u64;
        text.is_told = vec![true; text.tokens.len()];
        let first = text.items.last().map_or(0, |item| item.1);
        if bytes.below(4) == 0 && first < length {
            let start = first + bytes.below(length - first);
            let stop = start + 1 + bytes.below(length - start);
            text.items.push((start, stop, bytes.pick(&["x", "y"])));
        }
        text
    }

    fn admit(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let id = bytes.below(NUM_IDS);
        let text = self.prompt(bytes);
        let num_new_tokens = [None, None, Some(bytes.below(5))][bytes.below(3) as usize];
        let items: Vec<Item<'_>> =
            text.items.iter().map(|&(start, stop, key)| Item { start, stop, key }).collect();
        let prompt =
            Prompt { token_ids: &text.tokens, salt: text.salt, adapter: text.adapter, items: &items };
        let options = AdmitOptions {
            num_new_tokens,
            reserve_blocks: bytes.pick(&[0, 0, 0, 1, 2]),
            resumed: bytes.coin(),
        };
        let can = self.manager.can_admit(id, &prompt, &options);
        let found = self.manager.match_prefix(&prompt);
        let mut slots = Vec::new();
        let admitted = self.manager.admit(id, &prompt, &options, &mut slots);
        assert_eq!(can.unwrap_or(false), admitted.is_ok(), "`can_admit` and `admit` disagree");
        let computed = admitted?.num_computed_tokens;
        assert_eq!(Ok(computed), found, "`match_prefix` and `admit` disagree");
        assert!(computed == 0 || computed < text.tokens.len() as u64, "one token is left to compute");
        drop(items);
        self.texts.insert(id, text);
        self.appended(id, computed, &slots);
        Ok(())
    }

    /// Questions that may not change anything.
    fn ask(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let (id, text) = (bytes.below(NUM_IDS), self.prompt(bytes));
        let prompt = Prompt { salt: text.salt, adapter: text.adapter, ..Prompt::new(&text.tokens) };
        self.manager.can_admit(id, &prompt, &AdmitOptions::default())?;
        self.manager.match_prefix(&prompt)?;
        let length = self.manager.sequence_length(id)?;
        self.manager.locate(id, bytes.below(length + 2)).map(drop)
    }

    /// What the tokens from `start` on are: those of the prompt, while there are.
    fn draw(&self, id: SequenceId, start: u64, count: u64, bytes: &mut Bytes<'_>) -> Vec<u32> {
        let kept = self.texts[&id].tokens.iter().copied().skip(start as usize);
        let mut drawn: Vec<u32> = kept.take(count as usize).collect();
        while drawn.len() < count as usize {
            drawn.push(bytes.below(NUM_TOKENS) as u32);
        }
        drawn
    }

    /// One token or a run, with ids or without.
    fn append(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let (id, told, alone) = (bytes.below(NUM_IDS), bytes.coin(), bytes.coin());
        let count = if alone { 1 } else { bytes.below(6) };
        let start = self.manager.sequence_length(id)?;
        let drawn = self.draw(id, start, count, bytes);
        let mut slots = Vec::new();
        match (alone, told) {
            (true, true) => slots.push(self.manager.append_token(id, Some(drawn[0]))?),
            (true, false) => slots.push(self.manager.append_token(id, None)?),
            (false, true) => self.manager.append_tokens(id, drawn.len() as u64, Some(&drawn), &mut slots)?,
            (false, false) => self.manager.append_tokens(id, count, None, &mut slots)?,
        }
        self.grown(&[(id, start, drawn)], told, &slots, bytes);
        Ok(())
    }

    /// Some of the sequences; sometimes one twice, or one that does not exist.
    fn append_batch(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let told = bytes.coin();
        let mut ids: Vec<SequenceId> = self.texts.keys().copied().filter(|_| bytes.below(3) > 0).collect();
        if bytes.below(4) == 0 {
            ids.push(bytes.below(NUM_IDS));
        }
        let counts: Vec<u64> = ids.iter().map(|_| bytes.pick(&[1, 1, 1, 0, 2, 5])).collect();
        let mut ends = BTreeMap::new();
        let mut rows = Vec::new();
        for (&id, &count) in ids.iter().zip(&counts) {
            if !self.texts.contains_key(&id) {
                return self.manager.append_batch(&ids, Some(&counts), None, &mut Vec::new());
            }
            let end = ends.entry(id).or_insert(self.manager.sequence_length(id)?);
            rows.push((id, *end, self.draw(id, *end, count, bytes)));
            *end += count;
        }
        let mut slots = Vec::new();
        if told {
            let token_ids: Vec<u32> = rows.iter().flat_map(|(_, _, drawn)| drawn).copied().collect();
            self.manager.append_batch(&ids, Some(&counts), Some(&token_ids), &mut slots)?;
        } else {
            self.manager.append_batch(&ids, Some(&counts), None, &mut slots)?;
        }
        self.grown(&rows, told, &slots, bytes);
        Ok(())
    }

    /// Rows (sequence, first position, tokens) have grown, and got these slots. Copies come before writes: without the
    /// index both happen now; with it, at times later.
    fn grown(
        &mut self,
        rows: &[(SequenceId, u64, Vec<u32>)],
        told: bool,
        slots: &[Slot],
        bytes: &mut Bytes<'_>,
    ) {
        let mut rest = slots;
        let is_written = !self.manager.config().prefix_caching() || bytes.coin();
        if is_written {
            self.copy();
        }
        for (id, start, drawn) in rows {
            let text = self.texts.get_mut(id).expect("it exists");
            for (position, &token) in (*start as usize..).zip(drawn) {
                if position < text.tokens.len() {
                    text.is_told[position] |= told;
                } else {
                    text.tokens.push(token);
                    text.is_told.push(told);
                }
            }
            let own;
            (own, rest) = rest.split_at(drawn.len());
            if is_written {
                self.appended(*id, *start, own);
            }
        }
    }

    fn commit(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let ids: Vec<SequenceId> = if bytes.below(3) == 0 {
            self.texts.keys().copied().collect()
        } else {
            vec![bytes.below(NUM_IDS)]
        };
        let (tell, all) = (bytes.below(4) > 0, bytes.below(3) > 0);
        let mut ns = Vec::new();
        let mut token_ids = Vec::new();
        for id in &ids {
            let length = self.manager.sequence_length(*id)?;
            let n = if all { length } else { bytes.below(length + 2) };
            let text = &self.texts[id];
            let known = text.tokens.iter().zip(&text.is_told).take(n as usize);
            token_ids.extend(known.filter(|&(_, told)| !told).map(|(&token, _)| token));
            ns.push(n);
        }
        let before: Vec<u64> =
            ids.iter().map(|&id| self.manager.num_computed_tokens(id).expect("it exists")).collect();
        let told = tell.then_some(&token_ids[..]);
        if let ([id], [n], Some(token_ids)) = (&ids[..], &ns[..], told) {
            self.manager.commit(*id, *n, Some(token_ids))?;
        } else {
            self.manager.commit_batch(&ids, &ns, told)?;
        }
        for ((&id, &n), &computed) in ids.iter().zip(&ns).zip(&before) {
            if tell {
                let text = self.texts.get_mut(&id).expect("it exists");
                text.is_told.iter_mut().take(n as usize).for_each(|told| *told = true);
            }
            if self.manager.config().prefix_caching() {
                self.write(id, computed, n);
            }
        }
        Ok(())
    }

    fn release(&mut self, id: SequenceId) -> Result<()> {
        self.manager.release_sequence(id)?;
        self.texts.remove(&id);
        Ok(())
    }

    fn truncate(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let id = bytes.below(NUM_IDS);
        let length = self.manager.sequence_length(id)?;
        let n = bytes.below(length + 2);
        self.manager.truncate_sequence(id, n)?;
        let text = self.texts[&id].cut(n);
        self.texts.insert(id, text);
        Ok(())
    }

    fn fork(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        let (parent, child) = (bytes.below(NUM_IDS), bytes.below(NUM_IDS));
        let length = self.manager.sequence_length(parent)?;
        let n = if bytes.coin() { None } else { Some(bytes.below(length + 2)) };
        self.manager.fork_sequence(parent, child, n)?;
        self.texts.insert(child, self.texts[&parent].cut(n.unwrap_or(length)));
        Ok(())
    }

    fn hold(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        if bytes.coin() {
            let block = self.manager.allocate_block()?;
            self.held.push(block);
            return Ok(());
        }
        let block = bytes.below(7) as u32;
        self.manager.free_block(block)?;
        self.held.retain(|&held| held != block);
        Ok(())
    }

    fn pin(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        if bytes.coin() {
            let text = self.prompt(bytes);
            let prompt = Prompt { salt: text.salt, adapter: text.adapter, ..Prompt::new(&text.tokens) };
            let pin = self.manager.pin_prefix(&prompt)?;
            self.pins.push(pin);
            return Ok(());
        }
        let Some(&pin) = self.pins.first() else { return self.manager.unpin(1_000) };
        self.manager.unpin(pin)?;
        self.pins.remove(0);
        Ok(())
    }
}

//! What is done to both: operations as drawn, bent towards what exists, run on the model and on the manager.

use kvpager_core::{AdmitOptions, BlockId, BlockManager, Error, Item, Prompt, SequenceId, Slot, TokenId};
use proptest::prelude::*;

use crate::oracle::{Model, ModelSequence, Tokens, bad_argument};

#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Create(SequenceId),
    Admit(SequenceId, Tokens, AdmitOptions),
    CanAdmit(SequenceId, Tokens, AdmitOptions),
    Match(Tokens),
    Append(SequenceId, Option<TokenId>),
    AppendRun(SequenceId, u64),
    AppendIds(SequenceId, Vec<TokenId>),
    AppendBatch(Vec<SequenceId>, Option<Vec<TokenId>>),
    AppendBatchCounts(Vec<(SequenceId, u64)>, Option<Vec<TokenId>>),
    Commit(SequenceId, u64, Option<Vec<TokenId>>),
    CommitBatch(Vec<(SequenceId, u64)>, Option<Vec<TokenId>>),
    Release(SequenceId),
    Truncate(SequenceId, u64),
    Fork(SequenceId, SequenceId, Option<u64>),
    TakeCopies,
    Allocate,
    Free(BlockId),
    Pin(Tokens),
    Unpin(u64),
    Advance,
    Retire(u64),
    Reset,
    Slots(SequenceId, u64, u64),
}

/// What an operation answers, on either side.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Nothing,
    Slots(Vec<Slot>),
    Admitted(u64, Vec<Slot>),
    Pairs(Vec<(BlockId, BlockId)>),
    Number(u64),
}

pub(crate) fn on_model(model: &mut Model, operation: &Operation) -> Result<Answer, Error> {
    let nothing = |()| Answer::Nothing;
    match *operation {
        Operation::Create(id) => {
            if model.sequences.contains_key(&id) {
                return Err(Error::DuplicateSequence { sequence_id: id });
            }
            model.sequences.insert(id, ModelSequence::default());
            Ok(Answer::Nothing)
        }
        Operation::Admit(id, ref prompt, ref options) => {
            model.admit(id, prompt, options).map(|(computed, slots)| Answer::Admitted(computed, slots))
        }
        Operation::CanAdmit(id, ref prompt, ref options) => match model.plan(id, prompt, options) {
            Ok(_) => Ok(Answer::Number(1)),
            Err(Error::OutOfBlocks { .. }) => Ok(Answer::Number(0)),
            Err(error) => Err(error),
        },
        Operation::Match(ref prompt) => Ok(Answer::Number(model.match_prefix(prompt))),
        Operation::Append(id, token_id) => {
            let appended = model.append(&[(id, 1)], token_id.as_ref().map(std::slice::from_ref), false);
            appended.map(Answer::Slots).map_err(|error| match error {
                Error::Argument { .. } => bad_argument("token_id"),
                other => other,
            })
        }
        Operation::AppendRun(id, n) => model.append(&[(id, n)], None, false).map(Answer::Slots),
        Operation::AppendIds(id, ref token_ids) => {
            model.append(&[(id, token_ids.len() as u64)], Some(token_ids), false).map(Answer::Slots)
        }
        Operation::AppendBatch(ref ids, ref token_ids) => {
            let rows: Vec<_> = ids.iter().map(|&id| (id, 1)).collect();
            model.append(&rows, token_ids.as_deref(), true).map(Answer::Slots)
        }
        Operation::AppendBatchCounts(ref rows, ref token_ids) => {
            model.append(rows, token_ids.as_deref(), true).map(Answer::Slots)
        }
        Operation::Commit(id, n, ref token_ids) => {
            model.commit(&[(id, n)], token_ids.as_deref(), "n").map(nothing)
        }
        Operation::CommitBatch(ref rows, ref token_ids) => {
            model.commit(rows, token_ids.as_deref(), "ns").map(nothing)
        }
        Operation::Release(id) => {
            model.sequence(id)?;
            model.cut(id, 0);
            model.sequences.remove(&id);
            Ok(Answer::Nothing)
        }
        Operation::Truncate(id, n) => {
            if n > model.sequence(id)?.length {
                return Err(bad_argument("n"));
            }
            model.cut(id, n);
            Ok(Answer::Nothing)
        }
        Operation::Fork(parent, child, n) => model.fork(parent, child, n).map(nothing),
        Operation::TakeCopies => Ok(Answer::Pairs(model.take_copies())),
        Operation::Allocate => model.allocate().map(|block| Answer::Number(block.into())),
        Operation::Free(block) => model.free(block).map(nothing),
        Operation::Pin(ref prompt) => model.pin(prompt).map(Answer::Number),
        Operation::Unpin(pin) => model.unpin(pin).map(nothing),
        Operation::Advance => {
            model.epoch += 1;
            Ok(Answer::Number(model.epoch - 1))
        }
        Operation::Retire(epoch) => model.retire(epoch).map(nothing),
        Operation::Reset => {
            model.reset();
            Ok(Answer::Nothing)
        }
        Operation::Slots(id, start, stop) => model.slots(id, start, stop).map(Answer::Slots),
    }
}

pub(crate) fn on_manager(manager: &mut BlockManager, operation: &Operation) -> Result<Answer, Error> {
    let (mut slots, nothing) = (Vec::new(), |()| Answer::Nothing);
    match *operation {
        Operation::Create(id) => manager.create_sequence(id).map(nothing),
        Operation::Admit(id, ref tokens, ref options) => with_prompt(tokens, |prompt| {
            let admission = manager.admit(id, prompt, options, &mut slots)?;
            assert_eq!(admission.num_slots, slots.len() as u64);
            Ok(Answer::Admitted(admission.num_computed_tokens, slots))
        }),
        Operation::CanAdmit(id, ref tokens, ref options) => {
            let can = with_prompt(tokens, |prompt| manager.can_admit(id, prompt, options));
            can.map(|can| Answer::Number(can.into()))
        }
        Operation::Match(ref tokens) => {
            with_prompt(tokens, |prompt| manager.match_prefix(prompt)).map(Answer::Number)
        }
        Operation::Append(id, token_id) => {
            manager.append_token(id, token_id).map(|slot| Answer::Slots(vec![slot]))
        }
        Operation::AppendRun(id, n) => {
            manager.append_tokens(id, n, None, &mut slots).map(|()| Answer::Slots(slots))
        }
        Operation::AppendIds(id, ref token_ids) => manager
            .append_tokens(id, token_ids.len() as u64, Some(token_ids), &mut slots)
            .map(|()| Answer::Slots(slots)),
        Operation::AppendBatch(ref ids, ref token_ids) => {
            manager.append_batch(ids, None, token_ids.as_deref(), &mut slots).map(|()| Answer::Slots(slots))
        }
        Operation::AppendBatchCounts(ref rows, ref token_ids) => {
            let (ids, counts): (Vec<_>, Vec<_>) = rows.iter().copied().unzip();
            manager
                .append_batch(&ids, Some(&counts), token_ids.as_deref(), &mut slots)
                .map(|()| Answer::Slots(slots))
        }
        Operation::Commit(id, n, ref token_ids) => manager.commit(id, n, token_ids.as_deref()).map(nothing),
        Operation::CommitBatch(ref rows, ref token_ids) => {
            let (ids, ns): (Vec<_>, Vec<_>) = rows.iter().copied().unzip();
            manager.commit_batch(&ids, &ns, token_ids.as_deref()).map(nothing)
        }
        Operation::Release(id) => manager.release_sequence(id).map(nothing),
        Operation::Truncate(id, n) => manager.truncate_sequence(id, n).map(nothing),
        Operation::Fork(parent, child, n) => manager.fork_sequence(parent, child, n).map(nothing),
        Operation::TakeCopies => Ok(Answer::Pairs(manager.take_copies())),
        Operation::Allocate => manager.allocate_block().map(|block| Answer::Number(block.into())),
        Operation::Free(block) => manager.free_block(block).map(nothing),
        Operation::Pin(ref tokens) => {
            with_prompt(tokens, |prompt| manager.pin_prefix(prompt)).map(Answer::Number)
        }
        Operation::Unpin(pin) => manager.unpin(pin).map(nothing),
        Operation::Advance => manager.advance_epoch().map(Answer::Number),
        Operation::Retire(epoch) => manager.retire(epoch).map(nothing),
        Operation::Reset => {
            manager.reset_prefix_cache();
            Ok(Answer::Nothing)
        }
        Operation::Slots(id, start, stop) => {
            manager.slots(id, start, stop, &mut slots).map(|()| Answer::Slots(slots))
        }
    }
    .map_err(without_words)
}

fn with_prompt<T>(tokens: &Tokens, call: impl FnOnce(&Prompt<'_>) -> T) -> T {
    let items: Vec<Item<'_>> =
        tokens.items.iter().map(|&(start, stop, key)| Item { start, stop, key }).collect();
    let (salt, adapter) = tokens.namespace;
    call(&Prompt { token_ids: &tokens.ids, salt, adapter, items: &items })
}

/// The error without its words, which the model does not know.
fn without_words(error: Error) -> Error {
    match error {
        Error::Argument { argument, .. } => bad_argument(argument),
        Error::State { .. } => Error::State { reason: String::new() },
        Error::Slot { .. } => Error::Slot { reason: String::new() },
        Error::SequenceTooLong { .. } => Error::SequenceTooLong { reason: String::new() },
        other => other,
    }
}

// ---- drawing --------------------------------------------------------------------------------------------------------

/// Ids and positions are drawn as raw numbers and then bent towards what exists, so that most operations do something:
/// seven of eight name an existing sequence (a free id, for a new one), the rest any id of the world.
const RAW: u64 = 64;

/// Drawn as the only row of a batch: all sequences, as in a decode step.
const ALL: u64 = RAW;

impl Model {
    fn bend(&self, raw: u64, num_sequences: u64, wants_existing: bool) -> SequenceId {
        let of_the_kind =
            |&id: &SequenceId| self.sequences.contains_key(&id) == wants_existing || raw >= RAW * 7 / 8;
        let candidates: Vec<SequenceId> = (0..num_sequences).filter(of_the_kind).collect();
        candidates.get(raw as usize % candidates.len().max(1)).copied().unwrap_or(raw % num_sequences)
    }

    fn all(&self) -> Vec<SequenceId> {
        let mut ids: Vec<_> = self.sequences.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// The next token of all sequences that wait for the commit of just that one.
    fn next_of_all(&self) -> Vec<(SequenceId, u64)> {
        let rows = self.all().into_iter().map(|id| (id, self.sequences[&id].length));
        rows.filter(|&(id, length)| self.computed(id) + 1 == length).collect()
    }

    /// A position of the sequence, its end, or one past it.
    fn bend_position(&self, id: SequenceId, raw: u64) -> u64 {
        raw % (self.sequences.get(&id).map_or(0, |sequence| sequence.length) + 2)
    }

    /// Mostly the length, else a position of the sequence that may be committed, or one that may not.
    fn bend_commit(&self, id: SequenceId, raw: u64) -> u64 {
        let Some(sequence) = self.sequences.get(&id) else { return raw };
        if raw < RAW / 2 { sequence.length } else { self.bend_position(id, raw) }
    }

    /// Ids for a commit: mostly as many as it needs.
    fn bend_ids(&self, rows: &[(SequenceId, u64)], token_ids: Option<&Vec<TokenId>>) -> Option<Vec<TokenId>> {
        let token_ids = token_ids?;
        let mut model = self.clone();
        let num_drawn = token_ids.len();
        let fits = |num_ids: usize, model: &mut Model| {
            let ids: Vec<TokenId> = token_ids.iter().copied().cycle().take(num_ids).collect();
            let error = model.commit(rows, Some(&ids), "n").err();
            (error != Some(bad_argument("token_ids"))).then_some(ids)
        };
        if num_drawn == 0 || num_drawn > 5 {
            return Some(token_ids.clone());
        }
        (0..40).find_map(|num_ids| fits(num_ids, &mut model)).or_else(|| Some(token_ids.clone()))
    }

    /// The operation that a drawn one becomes in this state.
    pub(crate) fn resolve(&self, drawn: &Operation, num_sequences: u64) -> Operation {
        let old = |raw| self.bend(raw, num_sequences, true);
        let new = |raw| self.bend(raw, num_sequences, false);
        let cycled = |ids: &Option<Vec<TokenId>>, num_ids: u64| {
            let of = |ids: &Vec<TokenId>| ids.iter().copied().cycle().take(num_ids as usize).collect();
            ids.as_ref().filter(|ids| !ids.is_empty()).map(of)
        };
        match *drawn {
            Operation::Create(raw) => Operation::Create(new(raw)),
            Operation::Admit(raw, ref prompt, options) => Operation::Admit(new(raw), prompt.clone(), options),
            Operation::CanAdmit(raw, ref prompt, options) => {
                Operation::CanAdmit(new(raw), prompt.clone(), options)
            }
            Operation::Append(raw, token_id) => Operation::Append(old(raw), token_id),
            Operation::AppendRun(raw, n) => Operation::AppendRun(old(raw), n),
            Operation::AppendIds(raw, ref ids) => Operation::AppendIds(old(raw), ids.clone()),
            Operation::AppendBatch(ref ids, ref token_ids) => {
                let ids: Vec<_> =
                    if *ids == [ALL] { self.all() } else { ids.iter().map(|&raw| old(raw)).collect() };
                let token_ids = cycled(token_ids, ids.len() as u64);
                Operation::AppendBatch(ids, token_ids)
            }
            Operation::AppendBatchCounts(ref rows, ref token_ids) => {
                let rows: Vec<_> = rows.iter().map(|&(raw, n)| (old(raw), n)).collect();
                let token_ids = cycled(token_ids, rows.iter().map(|&(_, n)| n).sum());
                Operation::AppendBatchCounts(rows, token_ids)
            }
            Operation::Commit(raw, n, ref token_ids) => {
                let row = (old(raw), self.bend_commit(old(raw), n));
                Operation::Commit(row.0, row.1, self.bend_ids(&[row], token_ids.as_ref()))
            }
            Operation::CommitBatch(ref rows, ref token_ids)
                if rows.first().is_some_and(|row| row.0 == ALL) =>
            {
                let rows = self.next_of_all();
                let token_ids = cycled(token_ids, rows.len() as u64);
                Operation::CommitBatch(rows, token_ids)
            }
            Operation::CommitBatch(ref rows, ref token_ids) => {
                let bent = |&(raw, n): &(u64, u64)| (old(raw), self.bend_commit(old(raw), n));
                let rows: Vec<_> = rows.iter().map(bent).collect();
                let token_ids = self.bend_ids(&rows, token_ids.as_ref());
                Operation::CommitBatch(rows, token_ids)
            }
            Operation::Release(raw) => Operation::Release(old(raw)),
            Operation::Truncate(raw, n) => Operation::Truncate(old(raw), self.bend_position(old(raw), n)),
            Operation::Fork(parent, child, n) => {
                let n = n.map(|n| self.bend_position(old(parent), n));
                Operation::Fork(old(parent), new(child), n)
            }
            Operation::Free(block) => {
                let held = self.held.get(block as usize % self.held.len().max(1)).copied();
                let held = held.filter(|_| block < 48);
                Operation::Free(held.unwrap_or(block % (self.config.num_blocks() + 1)))
            }
            Operation::Unpin(raw) => {
                let held = self.pins.keys().nth(raw as usize % self.pins.len().max(1));
                Operation::Unpin(held.copied().unwrap_or(raw))
            }
            Operation::Retire(raw) => {
                Operation::Retire((self.epoch + 1).saturating_sub(raw % 4).saturating_sub(raw / (RAW - 1)))
            }
            Operation::Slots(raw, a, b) => {
                Operation::Slots(old(raw), self.bend_position(old(raw), a), self.bend_position(old(raw), b))
            }
            ref other => other.clone(),
        }
    }
}

fn token_ids(size: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<TokenId>> {
    // Few different ones, so that prompts share prefixes all the time.
    prop::collection::vec(prop::sample::select(vec![0, 0, 0, 0, 0, 1, 2]), size)
}

fn prompt(most: usize) -> impl Strategy<Value = Tokens> {
    let name = || prop_oneof![24 => Just(None), 1 => Just(Some("")), 1 => Just(Some("x"))];
    let items = prop_oneof![
        10 => Just(Vec::new()),
        1 => (0..3_u64, 1..4_u64, prop::sample::select(vec!["x", "y"]), any::<bool>()).prop_map(
            |(start, length, key, is_followed)| {
                let stop = start + length;
                let mut items = vec![(start, stop, key)];
                items.extend(is_followed.then_some((stop, stop + 2, "x")));
                items
            }
        ),
    ];
    (token_ids(0..=most), (name(), name()), items).prop_map(|(ids, namespace, mut items)| {
        items.retain(|item| item.1 <= ids.len() as u64);
        Tokens { ids, namespace, items }
    })
}

/// Weights that keep small pools in motion: forks and single appends often, so that copies come to be owed; long runs
/// and holds rarely, for they only fill the pool.
fn operation(num_blocks: u64, block_size: u64) -> impl Strategy<Value = Operation> {
    let raw = 0..RAW;
    let run = 0..=block_size + 1;
    let prefix = prop_oneof![3 => Just(None), 1 => raw.clone().prop_map(Some)];
    let most = (num_blocks * block_size + 1).min(2 * block_size + 2) as usize;
    let ids = || prop::option::weighted(0.8, token_ids(0..=6));
    let row = (raw.clone(), raw.clone());
    let reserve = prop_oneof![9 => Just(0), 1 => 0..=num_blocks, 1 => Just(u64::MAX)];
    let chunk = prop::option::weighted(0.3, 0..=block_size * 2);
    let options =
        (chunk, reserve, prop::bool::weighted(0.2)).prop_map(|(num_new_tokens, reserve_blocks, resumed)| {
            AdmitOptions { num_new_tokens, reserve_blocks, resumed }
        });
    prop_oneof![
        1 => raw.clone().prop_map(Operation::Create),
        45 => (raw.clone(), prompt(most), options.clone())
            .prop_map(|(id, prompt, options)| Operation::Admit(id, prompt, options)),
        1 => (raw.clone(), prompt(most), options)
            .prop_map(|(id, prompt, options)| Operation::CanAdmit(id, prompt, options)),
        2 => prompt(most).prop_map(Operation::Match),
        16 => (raw.clone(), prop::option::weighted(0.7, 0..3_u32)).prop_map(|(id, t)| Operation::Append(id, t)),
        1 => (raw.clone(), run.clone()).prop_map(|(id, n)| Operation::AppendRun(id, n)),
        2 => (raw.clone(), token_ids(0..=5)).prop_map(|(id, ids)| Operation::AppendIds(id, ids)),
        3 => (prop::collection::vec(raw.clone(), 0..5), ids())
            .prop_map(|(rows, ids)| Operation::AppendBatch(rows, ids)),
        1 => (prop::collection::vec((raw.clone(), run), 0..4), ids())
            .prop_map(|(rows, ids)| Operation::AppendBatchCounts(rows, ids)),
        6 => Just(Operation::AppendBatch(vec![ALL], None)),
        8 => token_ids(1..=3).prop_map(|ids| Operation::CommitBatch(vec![(ALL, 0)], Some(ids))),
        24 => (raw.clone(), raw.clone(), ids()).prop_map(|(id, n, ids)| Operation::Commit(id, n, ids)),
        6 => (prop::collection::vec(row, 0..4), ids()).prop_map(|(rows, ids)| Operation::CommitBatch(rows, ids)),
        18 => raw.clone().prop_map(Operation::Release),
        8 => (raw.clone(), raw.clone()).prop_map(|(id, n)| Operation::Truncate(id, n)),
        20 => (raw.clone(), raw.clone(), prefix).prop_map(|(a, b, n)| Operation::Fork(a, b, n)),
        1 => Just(Operation::TakeCopies),
        1 => Just(Operation::Allocate),
        2 => (0..RAW as BlockId).prop_map(Operation::Free),
        1 => prompt(most).prop_map(Operation::Pin),
        2 => raw.clone().prop_map(Operation::Unpin),
        2 => Just(Operation::Advance),
        7 => raw.clone().prop_map(Operation::Retire),
        1 => prop::sample::select(vec![0, 1, 2, 3]).prop_map(|raw| {
            // Seldom, for it ends all sharing.
            if raw == 0 { Operation::Reset } else { Operation::Advance }
        }),
        1 => (raw.clone(), raw.clone(), raw).prop_map(|(id, a, b)| Operation::Slots(id, a, b)),
    ]
}

/// Several sequences that share a tail and write it in one step: what single operations hardly ever come to.
fn burst() -> impl Strategy<Value = Vec<Operation>> {
    (0..RAW, 0..RAW, token_ids(1..=3)).prop_map(|(old, new, ids)| {
        vec![
            Operation::Release(new),
            Operation::CommitBatch(vec![(ALL, 0)], Some(ids)),
            Operation::Fork(old, new, None),
            Operation::Fork(old, new, None),
            Operation::AppendBatch(vec![ALL], None),
            Operation::TakeCopies,
        ]
    })
}

/// A list of operations for a pool.
pub(crate) fn operations(num_blocks: u64, block_size: u64) -> impl Strategy<Value = Vec<Operation>> {
    let some = prop_oneof![
        60 => operation(num_blocks, block_size).prop_map(|operation| vec![operation]),
        1 => burst(),
    ];
    prop::collection::vec(some, 46..=190).prop_map(|lists| lists.concat())
}

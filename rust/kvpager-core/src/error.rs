//! Everything a call can refuse, as values. The Python binding raises one class per variant, with the same wording.

use crate::ids::SequenceId;

/// What the calls of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused. The state is what it was before the call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The pool can't have this shape.
    #[error("{reason}")]
    Config {
        /// What is wrong, with the values.
        reason: String,
    },

    /// An argument is outside of what the call accepts.
    #[error("`{argument}`: wanted {wanted}, got {got}")]
    Argument {
        /// Name of the parameter.
        argument: &'static str,
        /// What would have been accepted, in words.
        wanted: String,
        /// What came, in words.
        got: String,
    },

    /// The pool can't hand out the blocks that the call needs.
    #[error(
        "need {needed} blocks{}, {free} free of {total}{}",
        OfThem(*watermark),
        OutOfBlocksDetail { fenced: *fenced, row: *row }
    )]
    OutOfBlocks {
        /// Blocks the whole call would take, and the watermark.
        needed: u64,
        /// Blocks that could be handed out when it was made: free or cached, without those that the call itself hits.
        free: u64,
        /// Blocks without a holder that an untaken copy or work in flight may still touch.
        fenced: u64,
        /// Blocks in the pool.
        total: u64,
        /// First row of a batched call that lacks a block; `None` for a call on one sequence.
        row: Option<usize>,
        /// Blocks among those needed that an admission keeps back for running sequences; 0 for any other call.
        watermark: u64,
    },

    /// The sequence can never fit, however long one waits.
    #[error("{reason}")]
    SequenceTooLong {
        /// How long it is, and what there is.
        reason: String,
    },

    /// The id names no sequence: never created, or released.
    #[error("no sequence with id {sequence_id}")]
    UnknownSequence {
        /// The id that was looked for.
        sequence_id: SequenceId,
    },

    /// The id is taken already.
    #[error("sequence {sequence_id} exists already")]
    DuplicateSequence {
        /// The id that exists.
        sequence_id: SequenceId,
    },

    /// The call is well-formed but not allowed in the present state.
    #[error("{reason}")]
    State {
        /// What stands in the way.
        reason: String,
    },

    /// A token position lies outside of what the sequence holds.
    #[error("{reason}")]
    Slot {
        /// The position, and how many there are.
        reason: String,
    },
}

/// The watermark in the out-of-blocks message.
struct OfThem(u64);

impl std::fmt::Display for OfThem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 > 0 { write!(f, " ({} of them the watermark)", self.0) } else { Ok(()) }
    }
}

/// The optional parts at the end of the out-of-blocks message.
struct OutOfBlocksDetail {
    fenced: u64,
    row: Option<usize>,
}

impl std::fmt::Display for OutOfBlocksDetail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.fenced > 0 {
            write!(f, " ({} fenced)", self.fenced)?;
        }
        if let Some(row) = self.row {
            write!(f, "; row {row} is the first that lacks one")?;
        }
        Ok(())
    }
}

impl Error {
    pub(crate) fn argument(
        argument: &'static str,
        wanted: impl Into<String>,
        got: impl std::fmt::Display,
    ) -> Self {
        Self::Argument { argument, wanted: wanted.into(), got: got.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wording() {
        let plain = Error::OutOfBlocks { needed: 3, free: 1, fenced: 0, total: 64, row: None, watermark: 0 };
        assert_eq!(plain.to_string(), "need 3 blocks, 1 free of 64");
        let full =
            Error::OutOfBlocks { needed: 3, free: 1, fenced: 2, total: 64, row: Some(7), watermark: 0 };
        assert_eq!(
            full.to_string(),
            "need 3 blocks, 1 free of 64 (2 fenced); row 7 is the first that lacks one"
        );
        let admission =
            Error::OutOfBlocks { needed: 5, free: 3, fenced: 1, total: 8, row: None, watermark: 2 };
        assert_eq!(admission.to_string(), "need 5 blocks (2 of them the watermark), 3 free of 8 (1 fenced)");
        let argument = Error::argument("num_tokens", "0 to 5 tokens", 6);
        assert_eq!(argument.to_string(), "`num_tokens`: wanted 0 to 5 tokens, got 6");
        assert_eq!(Error::UnknownSequence { sequence_id: 7 }.to_string(), "no sequence with id 7");
        assert_eq!(Error::DuplicateSequence { sequence_id: 7 }.to_string(), "sequence 7 exists already");
    }
}

//! What is done to a timed region: it is timed, or its instructions are counted by a tool that watches from outside.

use super::clock::{counted_region, thread_cpu_ns};
use super::workloads::Row;

/// One figure of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) row: Row,
    pub(crate) microseconds: f64,
}

/// Handed through a workload, which passes each of its regions to [`Meter::region`].
pub(crate) enum Meter {
    /// Keeps the time of each region, divided by its operations.
    Timing(Vec<Sample>),
    /// Runs the regions of one row inside [`counted_region`] and keeps how many operations they did.
    Counting { row: Row, num_operations: usize },
}

impl Meter {
    /// Runs `work`, which does `num_operations` of `row`, between one pair of clock readings.
    pub(crate) fn region(&mut self, row: Row, num_operations: usize, mut work: impl FnMut()) {
        match self {
            Self::Timing(samples) => {
                let start = thread_cpu_ns();
                work();
                let elapsed = thread_cpu_ns() - start;
                let microseconds = elapsed as f64 / 1e3 / num_operations as f64;
                samples.push(Sample { row, microseconds });
            }
            Self::Counting { row: counted, num_operations: total } if *counted == row => {
                counted_region(&mut work);
                *total += num_operations;
            }
            Self::Counting { .. } => work(),
        }
    }
}

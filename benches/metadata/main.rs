//! What the metadata plane costs beside bare arrays that do the same work: `cargo bench --bench metadata`.
//!
//! Six workloads of an engine (`workloads.rs` defines them), on two sides: `ours.rs` is `kvpager-core` through its
//! public calls, `floor.rs` the least that could do the same work, without what makes it right. The ratio says what
//! being right costs; the bar is 2.0 (`docs/metadata-plane.md` says why).
//!
//! ```text
//! cargo bench --bench metadata                       the table
//! cargo bench --bench metadata -- --json             the same for machines
//! cargo bench --bench metadata -- --runs 21          more runs of each side (15 unless told)
//! cargo bench --bench metadata -- --side core        one side alone: core or floor
//! cargo bench --bench metadata -- --row append       the workload that has this row alone
//! cargo bench --bench metadata -- --count append     one row of the core, once, its operations inside
//!                                                    `counted_region`: what `make instructions` runs under callgrind
//! ```
//!
//! Both sides run in turns on the same inputs, with one pair of readings of the thread's CPU clock around a whole
//! workload, so that reading it costs nothing worth mentioning and other jobs of the machine don't count. The first
//! turn warms up. Compare figures of one table with each other, never with those of another machine.
#![expect(clippy::print_stdout, reason = "the table is what it is for")]

mod clock;
mod floor;
mod meter;
mod ours;
mod report;
mod workloads;

use meter::{Meter, Sample};
use workloads::{NUM_PROMPTS, Row, SHARED_TOKENS};

/// Inputs, made once.
struct Inputs {
    prompts: Vec<Vec<u32>>,
    generated: Vec<Vec<u32>>,
}

/// One side of a workload: passes its regions to the meter.
type Side = fn(&Inputs, &mut Meter);

/// A workload on both sides, and the rows that it fills.
struct Workload {
    rows: &'static [Row],
    floor: Side,
    core: Side,
}

const WORKLOADS: [Workload; 5] = [
    Workload {
        rows: &[Row::Append, Row::Release, Row::Step],
        floor: |inputs, meter| floor::lifecycle(false, &inputs.generated, meter),
        core: |inputs, meter| {
            ours::lifecycle(false, &inputs.generated, meter);
            ours::steps(false, &inputs.generated, meter);
        },
    },
    Workload {
        rows: &[Row::AppendIndexed, Row::StepIndexed],
        floor: |inputs, meter| floor::lifecycle(true, &inputs.generated, meter),
        core: |inputs, meter| {
            ours::lifecycle(true, &inputs.generated, meter);
            ours::steps(true, &inputs.generated, meter);
        },
    },
    Workload {
        rows: &[Row::PromptsHeld],
        floor: |inputs, meter| floor::prompts(false, &inputs.prompts, meter),
        core: |inputs, meter| ours::prompts(false, &inputs.prompts, meter),
    },
    Workload {
        rows: &[Row::PromptsEvicting],
        floor: |inputs, meter| floor::prompts(true, &inputs.prompts, meter),
        core: |inputs, meter| ours::prompts(true, &inputs.prompts, meter),
    },
    Workload {
        rows: &[Row::DecodeRebuild, Row::DecodeDelta],
        floor: |_, meter| floor::decode(meter),
        core: |_, meter| ours::decode(meter),
    },
];

/// Both sides must have found the shared half in every prompt but the first.
fn check_hits(num_hit_tokens: usize) {
    assert_eq!(num_hit_tokens, (NUM_PROMPTS - 1) * SHARED_TOKENS);
}

/// What the command line asks for.
struct Arguments {
    json: bool,
    num_runs: usize,
    floor: bool,
    core: bool,
    only: Option<Row>,
    count: Option<Row>,
}

impl Arguments {
    /// `--bench` is what cargo adds.
    fn parse() -> Result<Self, String> {
        let mut parsed = Self { json: false, num_runs: 15, floor: true, core: true, only: None, count: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("`{word}` needs a value"));
            match word.as_str() {
                "--bench" => {}
                "--json" => parsed.json = true,
                "--runs" => {
                    let value = value()?;
                    let num_runs = value.parse().ok().filter(|&num_runs| num_runs > 0);
                    parsed.num_runs = num_runs.ok_or(format!("`--runs`: wanted 1 or more, got {value}"))?;
                }
                "--side" => match value()?.as_str() {
                    "core" => parsed.floor = false,
                    "floor" => parsed.core = false,
                    other => return Err(format!("`--side`: wanted core or floor, got {other}")),
                },
                "--row" => parsed.only = Some(row_of(&word, &value()?)?),
                "--count" => parsed.count = Some(row_of(&word, &value()?)?),
                other => {
                    return Err(format!(
                        "unknown option `{other}`; there are --json --runs --side --row --count"
                    ));
                }
            }
        }
        Ok(parsed)
    }
}

fn row_of(option: &str, value: &str) -> Result<Row, String> {
    let keys = Row::ALL.map(Row::key).join(", ");
    let row = Row::ALL.into_iter().find(|row| row.key() == value);
    row.ok_or_else(|| format!("`{option}`: wanted one of {keys}, got {value}"))
}

/// Runs the core's workload that has the row, once, and prints what is to be divided by.
fn count(row: Row, inputs: &Inputs) {
    let mut meter = Meter::Counting { row, num_operations: 0 };
    for workload in WORKLOADS.iter().filter(|workload| workload.rows.contains(&row)) {
        (workload.core)(inputs, &mut meter);
    }
    let Meter::Counting { num_operations, .. } = meter else { unreachable!("it counts") };
    println!("{{\"row\": \"{}\", \"operations\": {num_operations}}}", row.key());
}

/// Each workload on both sides in turns; the side that starts changes with each turn.
fn time(inputs: &Inputs, arguments: &Arguments) -> (Vec<Sample>, Vec<Sample>) {
    let (mut on_floor, mut on_core) = (Vec::new(), Vec::new());
    let wanted = |workload: &Workload| arguments.only.is_none_or(|row| workload.rows.contains(&row));
    for Workload { floor, core, .. } in WORKLOADS.into_iter().filter(wanted) {
        for turn in 0..=arguments.num_runs {
            let mut sides = [(floor, &mut on_floor, arguments.floor), (core, &mut on_core, arguments.core)];
            if turn % 2 == 1 {
                sides.reverse();
            }
            for (side, kept, _) in sides.into_iter().filter(|&(.., wanted)| wanted) {
                let mut meter = Meter::Timing(Vec::new());
                side(inputs, &mut meter);
                if let (Meter::Timing(samples), 1..) = (meter, turn) {
                    kept.extend(samples);
                }
            }
        }
    }
    (on_floor, on_core)
}

fn main() {
    let arguments = Arguments::parse().unwrap_or_else(|wrong| {
        eprintln!("{wrong}");
        std::process::exit(2);
    });
    let inputs = Inputs { prompts: workloads::prompts(), generated: workloads::generated() };
    if let Some(row) = arguments.count {
        return count(row, &inputs);
    }
    let (floor, core) = time(&inputs, &arguments);
    if arguments.json {
        println!("{}", report::json(&floor, &core, arguments.num_runs));
    } else {
        println!("{}", report::table(&floor, &core));
    }
}

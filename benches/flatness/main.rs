//! Whether the size of the pool matters: `cargo bench --bench flatness`.
//!
//! Every operation of the block manager is O(what it returns), so an append, a release or an eviction must execute the
//! same instructions in a pool of 10⁷ blocks as in one of 10⁴. Time also depends on caches: ten million blocks need
//! half a gigabyte of bookkeeping, and what is touched in a random order misses all of them.
//!
//! ```text
//! cargo bench --bench flatness                     times of both pools in turns, and the bytes a block needs
//! cargo bench --bench flatness -- --json           the same for machines
//! cargo bench --bench flatness -- --count evict --blocks 10000   one operation inside `counted_region`, for callgrind
//! ```
//!
//! | row | an operation is |
//! |---|---|
//! | `append` | one token of a batch of 16 sequences that grow to 8,192 tokens, group after group to a full pool |
//! | `release` | one block of these sequences, released in the order in which they were made |
//! | `append_random`, `release_random` | the same with the free blocks shuffled, sequences released in random order |
//! | `evict` | one block of a prompt of 8,192 tokens (admit, commit, release) in a pool full of other cached prompts |
//!
//! The pool has been full once before the times are taken, so that no page of memory is touched for the first time.
//! Bytes a block are counted by the process's allocator: a pool with the index, once filled and released, without
//! the token ids (4 bytes a position) and the tables of sequences. CPU time of the thread, medians of alternating runs.
#![expect(clippy::print_stdout, reason = "the table is what it is for")]

#[path = "../metadata/clock.rs"]
mod clock;
mod footprint;
mod pools;

use clock::{counted_region, thread_cpu_ns};
use pools::{Operation, World};

#[global_allocator]
static ALLOCATOR: footprint::Counting = footprint::Counting;

const SMALL: u64 = 10_000;
const LARGE: u64 = 10_000_000;

/// How often the small pool is run for each run of the large one: it is over too soon to be timed alone.
const SMALL_ROUNDS: usize = 20;

/// Nanoseconds an operation.
fn time(world: &mut World, operation: Operation) -> f64 {
    let rounds = if world.num_blocks() == SMALL { SMALL_ROUNDS } else { 1 };
    let (mut elapsed, mut num_operations) = (0, 0);
    for _ in 0..rounds {
        world.prepare(operation);
        let start = thread_cpu_ns();
        num_operations += world.run(operation);
        elapsed += thread_cpu_ns() - start;
    }
    elapsed as f64 / num_operations as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Medians of both pools for each operation, runs in turns.
fn times(num_runs: usize) -> Vec<(Operation, f64, f64)> {
    let mut rows = Vec::new();
    for indexed in [false, true] {
        let (mut small, mut large) = (World::new(SMALL, indexed), World::new(LARGE, indexed));
        for operation in Operation::ALL.into_iter().filter(|operation| operation.needs_index() == indexed) {
            let (mut of_small, mut of_large) = (Vec::new(), Vec::new());
            for _ in 0..num_runs {
                of_small.push(time(&mut small, operation));
                of_large.push(time(&mut large, operation));
            }
            rows.push((operation, median(of_small), median(of_large)));
        }
    }
    rows
}

struct Arguments {
    json: bool,
    num_runs: usize,
    count: Option<Operation>,
    num_blocks: u64,
}

impl Arguments {
    /// `--bench` is what cargo adds.
    fn parse() -> Result<Self, String> {
        let mut parsed = Self { json: false, num_runs: 5, count: None, num_blocks: SMALL };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("`{word}` needs a value"));
            let number = |text: String| {
                text.parse::<u64>().ok().filter(|&n| n > 0).ok_or(format!("`{text}` is no number above 0"))
            };
            match word.as_str() {
                "--bench" => {}
                "--json" => parsed.json = true,
                "--runs" => parsed.num_runs = number(value()?)? as usize,
                "--blocks" => parsed.num_blocks = number(value()?)?,
                "--count" => {
                    let key = value()?;
                    let found = Operation::ALL.into_iter().find(|operation| operation.key() == key);
                    parsed.count = Some(found.ok_or(format!("`--count`: there is no operation {key}"))?);
                }
                other => return Err(format!("unknown option `{other}`")),
            }
        }
        Ok(parsed)
    }
}

/// Runs the operation once in a pool that has been full, and prints what is to be divided by.
fn count(operation: Operation, num_blocks: u64) {
    let mut world = World::new(num_blocks, operation.needs_index());
    world.prepare(operation);
    let mut num_operations = 0;
    counted_region(&mut || num_operations = world.run_some(operation));
    println!("{{\"row\": \"{}\", \"operations\": {num_operations}}}", operation.key());
}

fn main() {
    let arguments = Arguments::parse().unwrap_or_else(|wrong| {
        eprintln!("{wrong}");
        std::process::exit(2);
    });
    if let Some(operation) = arguments.count {
        return count(operation, arguments.num_blocks);
    }
    let bytes_per_block = footprint::bytes_per_block(1_000_000);
    let rows = times(arguments.num_runs);
    if arguments.json {
        let rows: Vec<String> = rows
            .iter()
            .map(|(operation, small, large)| {
                let ratio = large / small;
                let key = operation.key();
                format!(
                    "    {{\"row\": \"{key}\", \"small_ns\": {small:.3}, \"large_ns\": {large:.3}, \
                     \"ratio\": {ratio:.3}}}"
                )
            })
            .collect();
        let rows = rows.join(",\n");
        println!("{{\n  \"bytes_per_block\": {bytes_per_block:.1},\n  \"rows\": [\n{rows}\n  ]\n}}");
        return;
    }
    println!("{:<16} {:>14} {:>14} {:>7}", "ns an operation", "10^4 blocks", "10^7 blocks", "ratio");
    for (operation, small, large) in rows {
        let ratio = large / small;
        let bar = operation.bar().map_or_else(String::new, |bar| {
            format!("  bar {bar}{}", if ratio <= bar { "" } else { ": MISSED" })
        });
        println!("{:<16} {small:>14.2} {large:>14.2} {ratio:>7.2}{bar}", operation.key());
    }
    let verdict = if bytes_per_block <= 96.0 { "" } else { ": MISSED" };
    println!("bytes of bookkeeping a block, index on: {bytes_per_block:.1}  bar 96{verdict}");
}

//! Medians of alternating runs, as a table for people or JSON for machines.

use std::fmt::Write as _;

use super::meter::Sample;
use super::workloads::Row;

/// The bar of every row: the core over the floor, medians of one run of this bench.
const BAR: f64 = 2.0;

/// All runs of one row on one side, in microseconds an operation.
struct Spread {
    median: f64,
    fastest: f64,
    slowest: f64,
}

impl Spread {
    fn of(samples: &[Sample], row: Row) -> Option<Self> {
        let mut times: Vec<f64> = samples.iter().filter(|s| s.row == row).map(|s| s.microseconds).collect();
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        let median = match times.len() {
            0 => return None,
            n if n % 2 == 0 => f64::midpoint(times[middle - 1], times[middle]),
            _ => times[middle],
        };
        Some(Self { median, fastest: times[0], slowest: times[times.len() - 1] })
    }

    fn json(&self) -> String {
        let Self { median, fastest, slowest } = self;
        format!("{{\"median_us\": {median:.4}, \"fastest_us\": {fastest:.4}, \"slowest_us\": {slowest:.4}}}")
    }

    fn cells(&self) -> String {
        let range = format!("{:.3}..{:.3}", self.fastest, self.slowest);
        format!("{:>8.3}  {range:<16}", self.median)
    }
}

/// One line a row that either side has.
pub(crate) fn table(floor: &[Sample], core: &[Sample]) -> String {
    let mut lines = format!(
        "{:<42} {:>8}  {:<16} {:>8}  {:<16} {:>6}\n",
        "µs an operation, thread CPU time", "floor", "fastest..slowest", "core", "fastest..slowest", "ratio"
    );
    for row in Row::ALL {
        let (bare, ours) = (Spread::of(floor, row.floor()), Spread::of(core, row));
        let blank = " ".repeat(26);
        let cells = |spread: &Option<Spread>| spread.as_ref().map_or_else(|| blank.clone(), Spread::cells);
        let _ = write!(lines, "{:<42} {} {}", row.words(), cells(&bare), cells(&ours));
        if let (Some(bare), Some(ours)) = (bare, ours) {
            let ratio = ours.median / bare.median;
            let verdict = if ratio <= BAR { "" } else { "  MISSED" };
            let _ = write!(lines, " {ratio:>6.2}{verdict}");
        }
        lines.push('\n');
    }
    let _ = writeln!(lines, "ratio = median of the core / median of the floor; bar {BAR}");
    lines
}

/// The same for machines.
pub(crate) fn json(floor: &[Sample], core: &[Sample], num_runs: usize) -> String {
    let rows: Vec<String> = Row::ALL
        .into_iter()
        .filter_map(|row| {
            let (bare, ours) = (Spread::of(floor, row.floor()), Spread::of(core, row));
            let sides = [("floor", &bare), ("core", &ours)];
            let mut fields = vec![format!("\"row\": \"{}\"", row.key())];
            fields.extend(sides.iter().filter_map(|(side, spread)| {
                spread.as_ref().map(|spread| format!("\"{side}\": {}", spread.json()))
            }));
            if let (Some(bare), Some(ours)) = (&bare, &ours) {
                let ratio = ours.median / bare.median;
                fields.push(format!("\"ratio\": {ratio:.4}, \"bar\": {BAR}, \"met\": {}", ratio <= BAR));
            }
            (fields.len() > 1).then(|| format!("    {{{}}}", fields.join(", ")))
        })
        .collect();
    format!("{{\n  \"runs\": {num_runs},\n  \"rows\": [\n{}\n  ]\n}}", rows.join(",\n"))
}

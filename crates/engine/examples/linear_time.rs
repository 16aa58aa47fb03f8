//! Times products with weight matrices of SmolLM2's sizes: GB/s of the bytes that the weights really take, and GMAC/s.
//! Weights come from memory: each measurement walks over copies of a matrix. Measurements take turns, round by round.
//! Usage: linear_time [threads] [rounds].
use half::f16;
use kvant_engine::model::linear::{BlockKind, Linear, WeightRows};
use kvant_engine::{Error, Pool, product_kernels};
use std::ops::Range;
use std::time::Instant;

/// Bytes of copies of one matrix: beyond the caches that a core can call its own.
const COPIES_BYTES: usize = 192 << 20;
const ROWS: [usize; 5] = [1, 4, 16, 64, 256];

/// A matrix of made-up numbers.
struct Made {
    n: usize,
    k: usize,
    kind: BlockKind,
}

impl Made {
    fn number(i: usize) -> u32 {
        (i as u32).wrapping_mul(2_654_435_761) >> 8
    }
}

impl WeightRows for Made {
    fn rows(&self) -> usize {
        self.n
    }
    fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        for (i, o) in out.iter_mut().enumerate() {
            *o = Made::number(rows.start * self.k + i) as f32 / (1 << 24) as f32 - 0.5;
        }
        Ok(())
    }
    fn kind(&self) -> BlockKind {
        self.kind
    }
    fn read_blocks(&self, rows: Range<usize>) -> Result<Vec<u8>, Error> {
        let block = |b: usize| {
            let codes = (0..16).map(move |i| Made::number(b * 16 + i) as u8).collect::<Vec<_>>();
            [f16::from_f32(0.06).to_le_bytes(), f16::from_f32(-0.5).to_le_bytes()].concat().into_iter().chain(codes)
        };
        Ok((rows.start * self.k / 32..rows.end * self.k / 32).flat_map(block).collect())
    }
}

/// One matrix under one number of rows.
struct Case {
    copies: usize,
    next: usize,
    x: Vec<f32>,
    rows: usize,
    seconds: Vec<f64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let number = |i: usize, default: usize| std::env::args().nth(i).map_or(Ok(default), |a| a.parse());
    let (threads, rounds) = (number(1, 2)?, number(2, 15)?.max(1));
    let pool = Pool::new(threads)?;
    let mut cases = Vec::new();
    for (n, k) in [(1536, 576), (576, 1536), (49152, 576)] {
        for kind in [BlockKind::Q4_1, BlockKind::Other] {
            let made = Made { n, k, kind };
            let one = || pool.run(|| Linear::new(k, &[&made], threads, false));
            let bytes = one()?.held_bytes();
            let copies = (0..COPIES_BYTES.div_ceil(bytes)).map(|_| one()).collect::<Result<Vec<_>, _>>()?;
            let of_rows = |rows: usize| {
                let mut x = vec![0.0; rows * k];
                Made { n: rows, k, kind }.read(0..rows, &mut x)?;
                Ok(Case { copies: (copies.len() / rows).max(1), next: 0, x, rows, seconds: Vec::new() })
            };
            let of_rows = ROWS.map(of_rows).into_iter().collect::<Result<Vec<_>, Error>>()?;
            cases.push((made, bytes, copies, of_rows));
        }
    }
    let mut out = vec![Vec::new()];
    for _ in 0..rounds {
        for (_, _, copies, of_rows) in &mut cases {
            for case in of_rows {
                let started = Instant::now();
                for _ in 0..case.copies {
                    pool.run(|| copies[case.next].forward(&case.x, &mut out))?;
                    case.next = (case.next + 1) % copies.len();
                }
                case.seconds.push(started.elapsed().as_secs_f64() / case.copies as f64);
            }
        }
    }
    let kernel = product_kernels().into_iter().find(|(_, runs)| runs.is_ok()).map_or("none", |(name, _)| name);
    println!("{kernel}, {threads} threads, {rounds} rounds; min and median");
    for (made, bytes, _, of_rows) in &mut cases {
        let bits = *bytes as f64 * 8.0 / (made.n * made.k) as f64;
        for case in of_rows {
            case.seconds.sort_by(f64::total_cmp);
            let (min, median) = (case.seconds[0], case.seconds[rounds / 2]);
            println!(
                "n {:>5} k {:>4} {bits:.1} bits, {:>3} rows: {:>7.1} {:>7.1} us, {:>5.1} {:>5.1} GB/s, {:>5.1} {:>5.1} GMAC/s",
                made.n,
                made.k,
                case.rows,
                min * 1e6,
                median * 1e6,
                *bytes as f64 / min / 1e9,
                *bytes as f64 / median / 1e9,
                (case.rows * made.n * made.k) as f64 / min / 1e9,
                (case.rows * made.n * made.k) as f64 / median / 1e9,
            );
        }
    }
    Ok(())
}

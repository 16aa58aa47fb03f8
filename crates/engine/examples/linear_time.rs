//! Times the products of one matrix. Usage: linear_time [threads].
use kvant_engine::{
    Pool,
    model::linear::{Linear, WeightRows},
};
use std::time::Instant;
struct Random {
    n: usize,
    k: usize,
}
impl WeightRows for Random {
    fn rows(&self) -> usize {
        self.n
    }
    fn read(&self, rows: std::ops::Range<usize>, out: &mut [f32]) -> Result<(), kvant_engine::Error> {
        for (i, o) in out.iter_mut().enumerate() {
            let s = ((rows.start * self.k + i) as u32).wrapping_mul(2654435761) >> 8;
            *o = s as f32 / 16777216.0 - 0.5;
        }
        Ok(())
    }
}
fn main() {
    let threads = std::env::args().nth(1).map_or(2, |t| t.parse().unwrap());
    let pool = Pool::new(threads).unwrap();
    for (k, n) in [(576, 1536), (576, 3072), (1536, 576), (576, 49152)] {
        let t = Instant::now();
        // copies, so that weights come from memory
        let copies = (64 << 20) / (k * n) + 1;
        let ls: Vec<Linear> =
            (0..copies).map(|_| pool.run(|| Linear::new(k, &[&Random { n, k }], threads, false).unwrap())).collect();
        let load = t.elapsed() / copies as u32;
        for m in [1usize, 2, 4, 16, 128, 256] {
            let mut x = vec![0.0; m * k];
            Random { n: m, k }.read(7..7 + m, &mut x).unwrap();
            let mut out = vec![Vec::new()];
            let mut best = f64::MAX;
            for _ in 0..(if m > 16 { 3 } else { 8 }) {
                let t = Instant::now();
                pool.run(|| {
                    for l in &ls {
                        l.forward(&x, &mut out).unwrap()
                    }
                });
                best = best.min(t.elapsed().as_secs_f64() / copies as f64);
            }
            println!(
                "k {k} n {n} m {m}: {:.1} us  {:.1} GB/s  {:.1} GMAC/s stacked  (load {load:?})",
                best * 1e6,
                k.next_multiple_of(256) as f64 * n as f64 * 34.0 / 32.0 / best / 1e9,
                2.0 * m as f64 * k.next_multiple_of(256) as f64 * n as f64 / best / 1e9
            );
        }
    }
}

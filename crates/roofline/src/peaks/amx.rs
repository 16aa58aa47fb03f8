//! AMX: products of 8-bit matrices in tiles. In: iterations; out: a number that depends on each.
//! NOT here: timing (mod.rs); asking the system for tiles, which kvant-kv's kernel does.

use std::arch::asm;

/// Products that do not wait for each other, one per tile of sums.
const CHAINS: usize = 4;
/// Rows of a tile.
const ROWS: usize = 16;
/// Bytes of a row.
const BYTES: usize = 64;
/// Sums of a row, 32 bits each.
const NUMBERS: usize = BYTES / 4;
/// Operations of one iteration.
pub(super) const TILE_OPS: u64 = (CHAINS * ROWS * NUMBERS * BYTES * 2) as u64;

/// Proof that the processor has tiles and that this process may use them.
#[derive(Clone, Copy)]
pub(super) struct Amx(());

#[repr(C, align(64))]
struct Config {
    palette: u8,
    zero: [u8; 15],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

#[repr(align(64))]
struct Tile([u8; ROWS * BYTES]);

impl Amx {
    pub(super) fn new() -> Option<Self> {
        let kernels = kvant_kv::attend::kernels();
        kernels.iter().any(|(name, runs)| *name == kvant_kv::attend::TILE_KERNEL && runs.is_ok()).then_some(Self(()))
    }

    pub(super) fn multiply(self, iterations: u64) -> f32 {
        let mut config = Config { palette: 1, zero: [0; 15], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(BYTES as u16);
        config.rows[..8].fill(ROWS as u8);
        let (a, b) = (Tile([3; ROWS * BYTES]), Tile([2; ROWS * BYTES]));
        let mut sums = [0i32; CHAINS * ROWS * NUMBERS];
        // SAFETY: self proves the instructions; every address is a tile of memory that outlives the block.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tileloadd tmm4, [{a} + {stride}]",
                "tileloadd tmm5, [{b} + {stride}]",
                "test {iterations}, {iterations}",
                "jz 3f",
                "2:",
                "tdpbsud tmm0, tmm4, tmm5",
                "tdpbsud tmm1, tmm4, tmm5",
                "tdpbsud tmm2, tmm4, tmm5",
                "tdpbsud tmm3, tmm4, tmm5",
                "dec {iterations}",
                "jnz 2b",
                "3:",
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 1024], tmm1",
                "tilestored [{sums} + {stride} + 2048], tmm2",
                "tilestored [{sums} + {stride} + 3072], tmm3",
                "tilerelease",
                config = in(reg) &config,
                a = in(reg) a.0.as_ptr(),
                b = in(reg) b.0.as_ptr(),
                sums = in(reg) sums.as_mut_ptr(),
                stride = in(reg) BYTES,
                iterations = inout(reg) iterations => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        sums.iter().fold(0i32, |all, &s| all.wrapping_add(s)) as f32
    }
}

//! AMX: products of 8-bit matrices (`tdpbsud`) on packed codes, where 8 query vectors share them: prefill, and 8 or more
//! query heads per kv head. Everything else is AVX-512 (avx512.rs), and so is the arithmetic: sums of integers are exact,
//! so that results equal `avx512-vnni` to the bit.
//!
//! One tile holds both limbs of 8 query vectors (16 rows) for 64 rows of codes; a tile of codes has these 64 rows for 16
//! lanes, which is what 16 unpacked lines of a panel are as they lie. Codes are unpacked to bytes in memory that stays near,
//! long before they are read: a tile cannot be loaded from stores that are still on their way. Half of that is spared for
//! 4 bits: a line as it is holds `c0 + 16*c1`, so the product with the line, less the product with its low halves, is that
//! with `16*c1`.
//! Tried and lost: fewer than 8 vectors (a product takes as long with 8 rows as with 16, tiles are loaded and stored in
//! bursts that leave memory idle, and cold caches then read slower than with `vpdpbusd`; docs/decisions/0010-amx.md).
//! NOT here: the loop (generic.rs), folds, softmax and f16 rows (avx512.rs), the bit format (quant/pack.rs).

use super::TILE_VECTORS;
use super::avx512::{self, Avx512Vnni, Limbs, for_each_slot};
use super::generic::{Scratch, Task, attend_range};
use super::kernel::{Kernel, MAX_FOLD, Panels, Sums};
use crate::attend::softmax::States;
use crate::quant::pack::{LINE, QUAD, SLOT_LANES, panel_bytes};
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// What [`Amx::new`] looks for.
pub(crate) const NEEDS: &str = "amx-tile, amx-int8 (and Linux's permission to use them), avx512f, avx512bw, avx512vl, \
                                avx512dq, avx512vnni";

/// Proof that the processor has the instructions and that the process may use them.
#[derive(Clone, Copy)]
pub(crate) struct Amx(Avx512Vnni);

impl Amx {
    pub(crate) fn new() -> Option<Self> {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        Avx512Vnni::new().filter(|_| *PERMITTED.get_or_init(|| has_tiles() && may_use_tiles())).map(Self)
    }
}

/// Whether the processor has tiles and products of bytes, and the system saves tiles (bits 17 and 18 of XCR0).
fn has_tiles() -> bool {
    #[target_feature(enable = "xsave")]
    fn saved() -> u64 {
        // SAFETY: register 0 exists wherever xgetbv does.
        unsafe { _xgetbv(0) }
    }
    const TILES: u64 = 0b11 << 17;
    let (leaf_1, leaf_7) = (__cpuid(1), if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 });
    let osxsave = leaf_1.ecx >> 27 & 1 == 1;
    let (tile, int8) = (leaf_7 >> 24 & 1 == 1, leaf_7 >> 25 & 1 == 1);
    // SAFETY: with OSXSAVE set the instruction may be used.
    tile && int8 && osxsave && unsafe { saved() } & TILES == TILES
}

/// Linux gives a process the memory for tiles when it asks for them (for all its threads, once and for all).
#[cfg(target_os = "linux")]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn may_use_tiles() -> bool {
    false
}

entry_point!(Amx, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");

impl Kernel for Amx {
    type Vectors = Avx512Vnni;
    const VECTORS: usize = FULL;

    #[inline(always)]
    fn vectors(self) -> Avx512Vnni {
        self.0
    }

    #[inline(always)]
    fn begin<const H: usize>(self) {
        if H < FULL {
            return;
        }
        let mut config = TileConfig { palette: 1, zero: [0; 15], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(LINE as u16);
        config.rows[..8].fill(TILE_ROWS as u8);
        // SAFETY: self proves the instructions; the configuration is a legal one.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &config,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }

    #[inline(always)]
    fn end<const H: usize>(self) {
        if H < FULL {
            return;
        }
        // SAFETY: self proves the instructions. Tiles given back need not be saved when threads change.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem),
            );
        }
    }

    #[inline(always)]
    fn prepare<const H: usize>(self, panels: Panels<'_>, ready: &mut [u8]) {
        if H < FULL {
            return;
        }
        panels.check_codes();
        assert!(ready.len() >= panels.lanes * panels.rows.next_multiple_of(CHUNK));
        assert!(ready.as_ptr().addr().is_multiple_of(LINE));
        // SAFETY: self proves the features; lengths and alignment were just checked.
        unsafe {
            match panels.bits {
                8 => prepare::<8>(panels, ready),
                4 => prepare::<4>(panels, ready),
                3 => prepare::<3>(panels, ready),
                _ => prepare::<2>(panels, ready),
            }
        }
    }

    #[inline(always)]
    fn panels<const H: usize>(
        self,
        panels: Panels<'_>,
        ready: &[u8],
        folded: &Limbs<H>,
        out: &mut [f32],
        stride: usize,
        sums: &mut Sums,
    ) {
        if H < FULL {
            return self.0.panels(panels, ready, folded, out, stride, sums);
        }
        panels.check::<H>(out, stride);
        assert!(ready.len() >= panels.lanes * panels.rows.next_multiple_of(CHUNK));
        // SAFETY: self proves the features, begin has set up tiles for H; lengths were just checked.
        unsafe {
            match panels.bits {
                8 => all_panels::<8, H>(panels, ready, folded, out, stride, sums),
                4 => all_panels::<4, H>(panels, ready, folded, out, stride, sums),
                3 => all_panels::<3, H>(panels, ready, folded, out, stride, sums),
                _ => all_panels::<2, H>(panels, ready, folded, out, stride, sums),
            }
        }
    }
}

/// Query vectors whose limbs fill a tile. Fewer leave the matrix unit to the vector unit, which is then as fast.
const FULL: usize = TILE_VECTORS;
/// Limbs of a multiplier.
const LIMBS: usize = 2;
// Whoever sizes prepared codes rounds rows up to a line: the same number.
const _: () = assert!(CHUNK == LINE && FULL * LIMBS == TILE_ROWS);
/// Rows of a tile, each of one line: quads of codes, or multipliers.
const TILE_ROWS: usize = 16;
/// Codes of a lane in a tile.
const CHUNK: usize = TILE_ROWS * QUAD;
/// Bytes of a tile.
const TILE: usize = TILE_ROWS * LINE;

/// Operand of `ldtilecfg`: tiles 0 to 3 are sums, 4 multipliers, 5 to 7 codes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    zero: [u8; 15],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// How a panel of SETS sets and so many rows is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// Tiles are the panel itself.
    Direct,
    /// Set 0 is unpacked, and set 1 is the panel itself less set 0.
    Half,
    Unpacked,
}

impl Reading {
    /// Tiles may be read from a record only when none reaches past its panel.
    const fn of<const BITS: u32, const SETS: usize>(rows: usize) -> Self {
        match (BITS, SETS) {
            (8, _) if rows.is_multiple_of(CHUNK) => Self::Direct,
            (4, 2) if rows.is_multiple_of(CHUNK) => Self::Half,
            _ => Self::Unpacked,
        }
    }
}

/// Unpacks what the panels' readings ask for: `ready[set][quad]`, lines of bytes.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn prepare<const BITS: u32>(panels: Panels<'_>, ready: &mut [u8]) {
    let set_bytes = SLOT_LANES * panels.rows.next_multiple_of(CHUNK);
    for (codes, first, lanes, prefetch) in panels.each() {
        let to = ready[first / SLOT_LANES * set_bytes..].as_mut_ptr();
        // SAFETY: the caller gives room for every set.
        unsafe {
            if lanes == SLOT_LANES {
                prepare_panel::<BITS, 1>(codes, panels.rows, to, set_bytes, prefetch);
            } else {
                prepare_panel::<BITS, 2>(codes, panels.rows, to, set_bytes, prefetch);
            }
        }
    }
}

/// One panel: `to[set][quad]`, sets `set_bytes` apart; the field of set s is left at bit `BITS*s`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn prepare_panel<const BITS: u32, const SETS: usize>(
    codes: &[u8],
    rows: usize,
    to: *mut u8,
    set_bytes: usize,
    prefetch: *const u8,
) {
    // SAFETY: the caller gives room for every slot; a prefetch may name any address.
    unsafe {
        let store = |quad: usize, set: usize, codes: __m512i| {
            _mm512_store_si512(to.add(set * set_bytes + quad * LINE).cast(), codes);
        };
        match Reading::of::<BITS, SETS>(rows) {
            Reading::Direct => {
                for at in (0..codes.len()).step_by(LINE) {
                    _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(at).cast());
                }
            }
            Reading::Half => for_each_slot::<BITS, SETS>(codes, prefetch, |quad, set, codes| {
                if set == 0 {
                    store(quad, set, codes);
                }
            }),
            Reading::Unpacked => for_each_slot::<BITS, SETS>(codes, prefetch, store),
        }
    }
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn all_panels<const BITS: u32, const H: usize>(
    panels: Panels<'_>,
    ready: &[u8],
    folded: &Limbs<H>,
    out: &mut [f32],
    stride: usize,
    sums: &mut Sums,
) {
    let mut done = 0;
    while done < panels.lanes {
        let block = Panels {
            codes: &panels.codes[panel_bytes(BITS, done, panels.rows)..],
            lanes: panels.lanes - done,
            ..panels
        };
        let ready = &ready[done * panels.rows.next_multiple_of(CHUNK)..];
        let out = &mut out[done..];
        // SAFETY: the block has at least so many lanes; the caller promises the rest.
        done += unsafe {
            match block.lanes {
                64.. => first_panels::<BITS, 2, 2, H>(block, ready, folded, out, stride, sums),
                32.. => first_panels::<BITS, 2, 1, H>(block, ready, folded, out, stride, sums),
                _ => first_panels::<BITS, 1, 1, H>(block, ready, folded, out, stride, sums),
            }
        };
    }
}

/// The first PANELS panels, of SETS sets of 16 lanes each; returns how many lanes that is.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn first_panels<const BITS: u32, const SETS: usize, const PANELS: usize, const H: usize>(
    panels: Panels<'_>,
    ready: &[u8],
    folded: &Limbs<H>,
    out: &mut [f32],
    stride: usize,
    sums: &mut Sums,
) -> usize {
    let all = SETS * PANELS;
    let chunks = panels.rows.div_ceil(CHUNK);
    let reading = Reading::of::<BITS, SETS>(panels.rows);
    let panel_bytes = panel_bytes(BITS, SETS * SLOT_LANES, panels.rows);
    let mut tiles = [std::ptr::null(); 4];
    for set in 0..all {
        let unpacked = ready[set * chunks * TILE..].as_ptr();
        let codes = &panels.codes[set / SETS * panel_bytes..];
        tiles[set] = match (reading, set % SETS) {
            (Reading::Direct, set) => codes[set * LINE..].as_ptr(),
            (Reading::Half, 1) => codes.as_ptr(),
            _ => unpacked,
        };
    }
    let line_stride = if reading == Reading::Direct { SETS * LINE } else { LINE };
    let multipliers = folded.limbs.as_ptr().cast();
    // SAFETY: every tile of codes is readable, and the limbs are rows of MAX_FOLD bytes that end in zeros.
    unsafe {
        match all {
            4 => multiply_4(multipliers, tiles, line_stride, chunks, sums.0.as_mut_ptr()),
            2 => multiply_2(multipliers, tiles, line_stride, chunks, sums.0.as_mut_ptr()),
            _ => multiply_1(multipliers, tiles, line_stride, chunks, sums.0.as_mut_ptr()),
        }
    }
    for panel in 0..PANELS {
        for h in 0..H {
            let mut set_0 = _mm512_setzero_si512();
            for set in 0..SETS {
                let row = |limb: usize| {
                    let at = ((panel * SETS + set) * TILE_ROWS + limb * H + h) * SLOT_LANES;
                    // SAFETY: sums of four tiles.
                    unsafe { _mm512_load_si512(sums.0.as_ptr().add(at).cast()) }
                };
                let mut sum = _mm512_add_epi32(_mm512_slli_epi32::<{ avx512::LOW_BITS }>(row(0)), row(1));
                if reading == Reading::Half {
                    (sum, set_0) = (_mm512_sub_epi32(sum, set_0), sum);
                }
                let descale = avx512::descale::<BITS, H>(folded, h, set);
                // SAFETY: the caller checked that out has H rows of all lanes.
                unsafe {
                    let out = out.as_mut_ptr().add(h * stride + (panel * SETS + set) * SLOT_LANES);
                    _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), descale, _mm512_loadu_ps(out)));
                }
            }
        }
    }
    all * SLOT_LANES
}

/// Defines a function that multiplies one tile row of multipliers with some columns of tiles:
/// `sums[set] = sum over chunks of multipliers[chunk] x tiles[set][chunk]`. Multipliers are rows of MAX_FOLD bytes,
/// tiles of codes have lines `line_stride` bytes apart, sums are tiles of 16 rows.
macro_rules! multiply {
    ($name:ident, $($sums:literal $codes:literal $tile:ident $set:literal),*) => {
        unsafe fn $name(
            multipliers: *const i8,
            tiles: [*const u8; 4],
            line_stride: usize,
            chunks: usize,
            sums: *mut i32,
        ) {
            // SAFETY: the caller promises tiles to read and to write; the processor has been prepared for them.
            unsafe {
                asm!(
                    $(concat!("tilezero tmm", $sums),)*
                    "2:",
                    "tileloadd tmm4, [{multipliers} + {row}]",
                    $(
                        concat!("tileloadd tmm", $codes, ", [{", stringify!($tile), "} + {line}]"),
                        concat!("tdpbsud tmm", $sums, ", tmm4, tmm", $codes),
                    )*
                    "add {multipliers}, 64",
                    $(concat!("add {", stringify!($tile), "}, {chunk}"),)*
                    "dec {chunks}",
                    "jnz 2b",
                    $(concat!("tilestored [{sums} + {sum_line} + 1024*", $set, "], tmm", $sums),)*
                    multipliers = inout(reg) multipliers => _,
                    row = in(reg) MAX_FOLD,
                    $($tile = inout(reg) tiles[$set] => _,)*
                    line = in(reg) line_stride,
                    chunk = in(reg) line_stride * TILE_ROWS,
                    chunks = inout(reg) chunks => _,
                    sums = in(reg) sums,
                    sum_line = in(reg) LINE,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}
// Sums in tiles 0 to 3; codes take turns in 5 to 7.
multiply!(multiply_4, "0" "5" tile0 0, "1" "6" tile1 1, "2" "7" tile2 2, "3" "5" tile3 3);
multiply!(multiply_2, "0" "5" tile0 0, "1" "6" tile1 1);
multiply!(multiply_1, "0" "5" tile0 0);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::cpu::kernel::{MAX_FOLD, Vectors};
    use half::f16;

    /// Numbers of no pattern: the high bytes of multiples of a large odd number.
    fn byte(i: usize) -> u8 {
        (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]
    }

    #[test]
    fn tiles_give_the_same_bits_as_dot_products() {
        let Some(amx) = Amx::new() else {
            return println!("skipped avx512-amx: this processor or system lacks one of {NEEDS}");
        };
        const H: usize = FULL;
        let x: Vec<f32> = (0..H * MAX_FOLD).map(|i| f32::from(byte(i)) / 100.0 - 1.0).collect();
        let mut sums = Sums::ZERO;
        // Multipliers of a longer fold first: what they leave behind must not show.
        let mut folded = amx.vectors().folded::<H>();
        amx.vectors().fold(&x, MAX_FOLD, &[f16::ONE; MAX_FOLD], &[2.0; H], &mut folded, 0);
        for bits in [8, 4, 3, 2] {
            for rows in [384, 256, 192, 160, 144, 128, 120, 112, 104, 96, 80, 72, 64, 32] {
                for lanes in [16, 32, 64, 80, 96, 128, 256] {
                    // A panel of 16 lanes has rows in multiples of 32.
                    // Rows that are no multiple of 32, and more than 256, are those of 2-bit keys, whose lanes are tokens.
                    let loud = rows % 16 != 0 || rows > 256;
                    if lanes % 32 == 16 && rows % 32 != 0 || lanes * rows > 128 * MAX_FOLD || loud && bits != 2 {
                        continue;
                    }
                    // Whoever folds leaves the multipliers behind the last row 0.
                    let scale = |i: usize| if i < rows { f32::from(byte(7 * i)) / 255.0 } else { 0.0 };
                    let scales: Vec<f16> = (0..rows.next_multiple_of(16)).map(|i| f16::from_f32(scale(i))).collect();
                    amx.vectors().fold(&x, MAX_FOLD, &scales, &[2.0; H], &mut folded, 0);
                    let codes: Vec<u8> = (0..panel_bytes(bits, lanes, rows)).map(byte).collect();
                    let panels = Panels { bits, codes: &codes, lanes, rows, prefetch: codes.as_ptr() };
                    let mut ready = vec![0x55; lanes * rows.next_multiple_of(CHUNK) + LINE];
                    let start = ready.as_ptr().align_offset(LINE);
                    let ready = &mut ready[start..];
                    let mut outs = [vec![0.25; H * lanes], vec![0.25; H * lanes]];
                    amx.prepare::<H>(panels, ready);
                    amx.begin::<H>();
                    amx.panels::<H>(panels, ready, &folded, &mut outs[0], lanes, &mut sums);
                    amx.end::<H>();
                    amx.vectors().panels::<H>(panels, &[], &folded, &mut outs[1], lanes, &mut sums);
                    let [tiles, dots] = outs.map(|out| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                    assert_eq!(tiles, dots, "{bits} bits, {rows} rows, {lanes} lanes");
                    assert!(dots.iter().any(|&x| x != 0.25f32.to_bits()));
                }
            }
        }
    }
}

//! AVX-VNNI (256-bit VNNI without AVX-512): 16-bit dot products that add to their sums (`vpdpwssd`) on packed codes.
//! Everything else, and all of the arithmetic's reasoning, is that of avx2.rs: the results are the same to the bit.
//! NOT here: the loop (generic.rs), the bit format (quant/pack.rs), folds and f16 rows (avx2.rs).

use super::avx2::{Avx2, Words, panel_with};
use super::generic::{Scratch, Task, attend_range};
use super::kernel::{Kernel, Panels, Sums};
use crate::attend::softmax::States;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use std::arch::x86_64::*;

/// What [`AvxVnni::new`] looks for.
pub(crate) const NEEDS: &str = "avx2, fma, f16c, avxvnni";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni(Avx2);

impl AvxVnni {
    pub(crate) fn new() -> Option<Self> {
        Avx2::new().filter(|_| is_x86_feature_detected!("avxvnni")).map(Self)
    }
}

entry_point!(AvxVnni, "avx2,fma,f16c,avxvnni");

impl Kernel for AvxVnni {
    type Vectors = Avx2;
    const VECTORS: usize = 4;

    #[inline(always)]
    fn vectors(self) -> Avx2 {
        self.0
    }

    #[inline(always)]
    fn panels<const H: usize>(
        self,
        panels: Panels<'_>,
        _ready: &[u8],
        folded: &Words<H>,
        out: &mut [f32],
        stride: usize,
        _sums: &mut Sums,
    ) {
        panels.check::<H>(out, stride);
        for (codes, first, lanes, prefetch) in panels.each() {
            // SAFETY: self proves the features; out holds H rows of all lanes, and the codes have at most MAX_FOLD rows.
            unsafe { panel(panels.bits, codes, lanes, folded, &mut out[first..], stride, prefetch) }
        }
    }
}

// `vpdpwssd` takes 5 cycles and two start in one: 8 sums keep it nearly busy.
panel_with!("avx2,fma,f16c,avxvnni", 2, |sums, words, x| _mm256_dpwssd_avx_epi32(sums, words, x));

//! What an instruction set provides to the attention loop: vector operations, and products with codes.
//! NOT here: the loop (generic.rs, coded.rs), instructions (one file per instruction set).

use crate::Codebook;
use crate::element::Element;
use crate::quant::grid::Grid;
use crate::quant::pack::{PANEL_LANES, SLOT_LANES, panel_bytes};
use half::f16;

/// Most query vectors that share one pass over the codes, of all kernels.
pub(crate) const MAX_VECTORS: usize = 8;
/// Most rows of a panel: channels of a head and once more its loud ones (at most half), or tokens of a group. A multiple of 64,
/// as whole tiles of multipliers are read.
pub(crate) const MAX_FOLD: usize = 384;
/// Most rows of codes of more than 2 bits: channels of a head, or tokens of a group.
pub(crate) const MAX_ROWS: usize = 256;

/// 16 partial sums: adding them up waits until the total is needed.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Lanes(pub [f32; SLOT_LANES]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0.0; SLOT_LANES]);

    /// The total, by halves: a tree is faster than a chain and rounds better.
    pub(crate) fn total(&self) -> f32 {
        let a: [f32; 8] = std::array::from_fn(|i| self.0[i] + self.0[i + 8]);
        let b: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (b[0] + b[2]) + (b[1] + b[3])
    }
}

/// One way to attend: the vector operations of an instruction set, and a way to multiply with codes. A value of an
/// implementing type proves that the processor has what it needs.
pub(crate) trait Kernel: Copy {
    type Vectors: Vectors;
    /// Query vectors that share one pass over the codes: as many as the accumulators have registers for.
    const VECTORS: usize;
    fn vectors(self) -> Self::Vectors;
    /// Prepares the processor for [`Kernel::panels`] with H vectors, which may fault without. A panic before
    /// [`Kernel::end`] leaves it prepared, which costs the system a little and disturbs nobody.
    #[inline(always)]
    fn begin<const H: usize>(self) {}
    /// Undoes what [`Kernel::begin`] did.
    #[inline(always)]
    fn end<const H: usize>(self) {}
    /// Makes codes ready for [`Kernel::panels`], which other work should part from this: memory that was just written is
    /// read late. While it runs it asks for the memory from `prefetch` on, as many bytes as there are codes.
    #[inline(always)]
    fn prepare<const H: usize>(self, _panels: Panels<'_>, _ready: &mut [u8]) {}
    /// `out[h][lane] += sum over rows of folded[h][row] * code[row][lane]`, row `stride` of `out`; `ready` is what
    /// [`Kernel::prepare`] wrote. Kernels that prepare nothing ask for memory here.
    fn panels<const H: usize>(
        self,
        panels: Panels<'_>,
        ready: &[u8],
        folded: &<Self::Vectors as Vectors>::Folded<H>,
        out: &mut [f32],
        stride: usize,
        sums: &mut Sums,
    );
}

/// Panels that lie one after another and share multipliers.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub bits: u32,
    pub codes: &'a [u8],
    /// Of all panels together, a multiple of 16: each has 32, the last maybe 16.
    pub lanes: usize,
    pub rows: usize,
    pub prefetch: *const u8,
}

impl<'a> Panels<'a> {
    /// Panics unless `out` has H rows of all lanes, and the codes are as [`Panels::check_codes`] asks: what kernels rely on.
    #[inline(always)]
    pub(crate) fn check<const H: usize>(&self, out: &[f32], stride: usize) {
        assert!(out.len() >= (H - 1) * stride + self.lanes);
        self.check_codes();
    }

    /// Panics unless the codes are those of `lanes` by `rows`, at most MAX_ROWS rows, or MAX_FOLD of 2 bits.
    #[inline(always)]
    pub(crate) fn check_codes(&self) {
        // What exact sums of integers allow: only 2-bit keys have loud rows.
        let most = if self.bits == 2 { MAX_FOLD } else { MAX_ROWS };
        assert!(self.lanes.is_multiple_of(SLOT_LANES) && (1..=most).contains(&self.rows));
        // Codes of one bit become bytes first.
        assert!(self.bits > 1);
        assert!(self.codes.len() == panel_bytes(self.bits, self.lanes, self.rows));
    }

    /// Panel by panel: its codes, first lane, lanes, and the memory to ask for.
    #[inline(always)]
    pub(crate) fn each(self) -> impl Iterator<Item = (&'a [u8], usize, usize, *const u8)> {
        let bytes = panel_bytes(self.bits, PANEL_LANES, self.rows);
        self.codes.chunks(bytes).enumerate().map(move |(i, codes)| {
            let first = i * PANEL_LANES;
            (codes, first, PANEL_LANES.min(self.lanes - first), self.prefetch.wrapping_add(i * bytes))
        })
    }
}

/// Codes of half a record that become bytes.
pub(crate) enum Expand<'a> {
    /// Panels of a grid's codes.
    Grid { grid: &'a Grid, codes: &'a [u8] },
    /// Sub-vectors of keys: lanes of the bytes are tokens.
    Keys { book: &'a Codebook, codes: &'a [u8], group_len: usize },
    /// Sub-vectors of values: lanes of the bytes are channels.
    Values { book: &'a Codebook, codes: &'a [u8], group_len: usize },
}

impl Expand<'_> {
    pub(crate) fn codes(&self) -> &[u8] {
        match self {
            Expand::Grid { codes, .. } | Expand::Keys { codes, .. } | Expand::Values { codes, .. } => codes,
        }
    }
}

impl Expand<'_> {
    /// Panics unless codes and bytes fit each other: what unchecked reads and writes rely on.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn check(&self, out: &[u8]) {
        match *self {
            Expand::Grid { grid, codes } => assert_eq!(codes.len() * 8, out.len() * grid.bits as usize),
            Expand::Keys { book, codes, group_len } | Expand::Values { book, codes, group_len } => {
                assert!(codes.len() * 8 >= book.subs() * group_len * book.centroids().ilog2() as usize);
                assert!(out.len() == book.head_dim() * group_len && group_len.is_multiple_of(PANEL_LANES));
            }
        }
    }
}

/// Integer sums of 64 lanes, two rows per vector.
#[repr(align(64))]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Sums(pub [i32; 2 * PANEL_LANES * 2 * MAX_VECTORS]);

impl Sums {
    pub(crate) const ZERO: Self = Self([0; 2 * PANEL_LANES * 2 * MAX_VECTORS]);
}

/// The vector operations of one instruction set.
///
/// Matrices are f32 with a row `stride`; row h belongs to query vector h of H.
pub(crate) trait Vectors: Copy {
    /// Multipliers made by [`Vectors::fold`].
    type Folded<const H: usize>;
    fn folded<const H: usize>(self) -> Self::Folded<H>;
    /// Folds `x[h][i] * scales[i]` for rows `at..` of the panels that follow; multipliers of rows behind them are 0 up to a
    /// multiple of 64. `at` and `scales.len()` are multiples of 16, together at most [`MAX_FOLD`]. Folds of the same panels
    /// come in the order of their rows and with the same bounds.
    /// `bound[h]` is at least every magnitude in row h: what integer multipliers are scaled by.
    fn fold<const H: usize>(
        self,
        x: &[f32],
        stride: usize,
        scales: &[f16],
        bound: &[f32; H],
        folded: &mut Self::Folded<H>,
        at: usize,
    );
    /// Largest of `y`; its length is a multiple of 32. Kernels that fold without bounds may say 0.
    fn largest(self, y: &[f16]) -> f32;
    /// `top[i] = max(top[i], y[i])`; the length of `y` is a multiple of 16.
    fn raise(self, top: &mut [f32], y: &[f16]);
    /// Largest of `|x[h][i]| * top[i]`; the length of `top` is a multiple of 16.
    fn bound<const H: usize>(self, x: &[f32], stride: usize, top: &[f32]) -> [f32; H];
    /// `sum over i of x[h][i] * y[i]`, added lane by lane (i mod 16) to `sums`; the length of `y` is a multiple of 16.
    fn dot<const H: usize>(self, x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]);
    /// `out[h][token] = sum over channels of q[h][channel] * k[channel][token]` for 32 tokens.
    fn plain_scores<E: Element, const H: usize>(
        self,
        q: &[f32],
        head_dim: usize,
        k: &[E],
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    );
    /// `out[h][channel] += sum over tokens of p[h][token] * v[token][channel]`; v has rows of `head_dim`.
    #[allow(clippy::too_many_arguments)]
    fn plain_values<E: Element, const H: usize>(
        self,
        p: &[f32],
        stride: usize,
        v: &[E],
        head_dim: usize,
        out: &mut [f32],
        prefetch: *const u8,
    );
    /// Writes the levels of codes as panels of 8 bits. While it does, it asks for the memory from `prefetch` on, as many bytes as
    /// there are codes.
    #[inline(always)]
    fn expand(self, from: &Expand<'_>, out: &mut [u8], prefetch: *const u8) {
        self.prefetch(prefetch, from.codes().len());
        super::expand::expand(from, out);
    }
    /// `out[i] = y[i]`; the length is a multiple of 16.
    fn widen(self, y: &[f16], out: &mut [f32]);
    /// Asks for memory that will be read soon.
    fn prefetch(self, from: *const u8, bytes: usize);
    /// Largest score; the length is a multiple of 16.
    fn max(self, scores: &[f32]) -> f32;
    /// `scores[i] = exp(scores[i] - max)`, exactly 0 for -inf; adds the results to `sum`. The length is a multiple of 16.
    fn exp(self, scores: &mut [f32], max: f32, sum: &mut Lanes);
}

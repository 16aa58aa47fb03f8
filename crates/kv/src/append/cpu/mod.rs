//! CPU kernels of append and of its way back: the VARIANTS table, best first. A new variant is one file and one line here.
//! Every variant writes the same bytes (parity.rs), so which one ran cannot be seen in a cache.
//! NOT here: the algorithms (generic.rs, fitting.rs, dequantize.rs, coded.rs), which tokens are packed when (cache/).

/// Gives a proof type the operation's functions, compiled for its instructions: the generic code is inlined into one
/// function per operation that has the features.
#[cfg(target_arch = "x86_64")]
macro_rules! entry_points {
    ($proof:ident, $features:literal) => {
        impl $proof {
            pub(super) fn finite(self, x: &[f32], format: RowFormat) -> bool {
                #[target_feature(enable = $features)]
                fn entry(kernel: $proof, x: &[f32], format: RowFormat) -> bool {
                    generic::finite(kernel, x, format)
                }
                // SAFETY: self proves the features.
                unsafe { entry(self, x, format) }
            }

            pub(super) fn write_rows(
                self,
                layout: &PlainLayout,
                block: &mut [u8],
                slot: usize,
                row_len: usize,
                k: &[f32],
                v: &[f32],
            ) {
                #[target_feature(enable = $features)]
                fn entry(
                    kernel: $proof,
                    layout: &PlainLayout,
                    block: &mut [u8],
                    slot: usize,
                    row_len: usize,
                    k: &[f32],
                    v: &[f32],
                ) {
                    generic::write_rows(kernel, layout, block, slot, row_len, k, v);
                }
                // SAFETY: self proves the features.
                unsafe { entry(self, layout, block, slot, row_len, k, v) }
            }

            pub(super) fn write_record(
                self,
                layout: &RecordLayout,
                head: usize,
                blocks: &[(&[f16], &[f16])],
                sinks: usize,
                record: &mut [u8],
            ) {
                #[target_feature(enable = $features)]
                fn entry(
                    kernel: $proof,
                    layout: &RecordLayout,
                    head: usize,
                    blocks: &[(&[f16], &[f16])],
                    sinks: usize,
                    record: &mut [u8],
                ) {
                    generic::write_record(kernel, layout, head, blocks, sinks, record);
                }
                // SAFETY: self proves the features.
                unsafe { entry(self, layout, head, blocks, sinks, record) }
            }

            pub(super) fn dequantize(
                self,
                layout: &RecordLayout,
                head: usize,
                record: &[u8],
                blocks: &mut [(&mut [f16], &mut [f16])],
            ) {
                #[target_feature(enable = $features)]
                fn entry(
                    kernel: $proof,
                    layout: &RecordLayout,
                    head: usize,
                    record: &[u8],
                    blocks: &mut [(&mut [f16], &mut [f16])],
                ) {
                    dequantize::dequantize(kernel, layout, head, record, blocks);
                }
                // SAFETY: self proves the features.
                unsafe { entry(self, layout, head, record, blocks) }
            }

            pub(super) fn assign(self, rows: &[f32], len: usize, values: &[f32], squares: &[f32], codes: &mut [u8]) {
                #[target_feature(enable = $features)]
                fn entry(kernel: $proof, rows: &[f32], len: usize, values: &[f32], squares: &[f32], codes: &mut [u8]) {
                    coded::assign(kernel, rows, len, values, squares, codes);
                }
                // SAFETY: self proves the features.
                unsafe { entry(self, rows, len, values, squares, codes) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod coded;
mod dequantize;
mod fitting;
mod generic;
mod portable;

use crate::RowFormat;
use crate::cache::layout::{PlainLayout, RecordLayout};
use crate::quant::codebook::Assign;
use half::f16;

/// See [`generic::write_rows`]: layout, block, slot, row_len, k, v.
pub(crate) type WriteRows = fn(&PlainLayout, &mut [u8], usize, usize, &[f32], &[f32]);
/// See [`generic::write_record`]: layout, kv head, blocks, sinks, record.
pub(crate) type WriteRecord = fn(&RecordLayout, usize, &[(&[f16], &[f16])], usize, &mut [u8]);
/// See [`dequantize::dequantize`]: layout, kv head, record, blocks.
pub(crate) type Dequantize = fn(&RecordLayout, usize, &[u8], &mut [(&mut [f16], &mut [f16])]);

/// One way to append.
pub(crate) struct Variant {
    pub name: &'static str,
    /// Whether this processor can run it, or what it lacks. The functions below panic when it cannot.
    pub available: fn() -> Result<(), String>,
    /// Whether all numbers round to finite ones of the format.
    pub finite: fn(&[f32], RowFormat) -> bool,
    pub write_rows: WriteRows,
    pub write_record: WriteRecord,
    pub dequantize: Dequantize,
    /// See [`coded::assign`].
    pub assign: Assign,
}

/// Every variant of this build, best first.
pub(crate) const VARIANTS: &[Variant] = &[
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx512",
        available: || available(avx512::Avx512::new(), avx512::NEEDS),
        finite: |x, format| proof(avx512::Avx512::new()).finite(x, format),
        write_rows: |l, block, slot, row_len, k, v| {
            proof(avx512::Avx512::new()).write_rows(l, block, slot, row_len, k, v);
        },
        write_record: |l, head, blocks, sinks, record| {
            proof(avx512::Avx512::new()).write_record(l, head, blocks, sinks, record);
        },
        dequantize: |l, head, record, blocks| proof(avx512::Avx512::new()).dequantize(l, head, record, blocks),
        assign: |rows, len, values, squares, codes| {
            proof(avx512::Avx512::new()).assign(rows, len, values, squares, codes);
        },
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx2",
        available: || available(avx2::Avx2::new(), avx2::NEEDS),
        finite: |x, format| proof(avx2::Avx2::new()).finite(x, format),
        write_rows: |l, block, slot, row_len, k, v| {
            proof(avx2::Avx2::new()).write_rows(l, block, slot, row_len, k, v);
        },
        write_record: |l, head, blocks, sinks, record| {
            proof(avx2::Avx2::new()).write_record(l, head, blocks, sinks, record);
        },
        dequantize: |l, head, record, blocks| proof(avx2::Avx2::new()).dequantize(l, head, record, blocks),
        assign: |rows, len, values, squares, codes| {
            proof(avx2::Avx2::new()).assign(rows, len, values, squares, codes);
        },
    },
    Variant {
        name: "portable",
        available: || Ok(()),
        finite: |x, format| generic::finite(portable::Portable, x, format),
        write_rows: |l, block, slot, row_len, k, v| {
            generic::write_rows(portable::Portable, l, block, slot, row_len, k, v);
        },
        write_record: |l, head, blocks, sinks, record| {
            generic::write_record(portable::Portable, l, head, blocks, sinks, record);
        },
        dequantize: |l, head, record, blocks| dequantize::dequantize(portable::Portable, l, head, record, blocks),
        assign: |rows, len, values, squares, codes| {
            coded::assign(portable::Portable, rows, len, values, squares, codes);
        },
    },
];

/// The first variant that this processor can run.
pub(crate) fn best() -> &'static Variant {
    VARIANTS.iter().find(|v| (v.available)().is_ok()).expect("portable runs everywhere")
}

#[cfg(target_arch = "x86_64")]
fn available<T>(proof: Option<T>, needs: &str) -> Result<(), String> {
    proof.map(|_| ()).ok_or_else(|| format!("this processor lacks one of {needs}"))
}

#[cfg(target_arch = "x86_64")]
fn proof<T>(proof: Option<T>) -> T {
    proof.expect("checked by available")
}

//! Attention over codes that exist already: the dense operation. In: codes, scales and zeros of a quantized K and V with
//! any number of tokens (the last group may be short); out: as the cache's attention. It packs the codes into the same
//! records and runs the same kernels, which is how golden cases reach them.
//! NOT here: appending, windows, sinks.

use super::cpu::generic::Source;
use super::plan::{self, Problem};
use super::{AttendOptions, Attention, check_len, check_options};
use crate::append::record::write_record_from_codes;
use crate::cache::layout::RecordLayout;
use crate::quant::affine::Affine;
use crate::scheme::{BITS, GROUP_LENS};
use crate::{Error, LayerShape, RowFormat};
use half::{bf16, f16};

/// Codes and parameters of K and V over leading `layers` and `batch` axes.
///
/// Shapes (S tokens, D = head_dim, g = group_len, gv = min(g, D)):
/// `k_codes`, `v_codes`: `[layers][batch][kv_heads][S][D]`; `k_scale`, `k_zero`: `[..][ceil(S/g)][D]`;
/// `v_scale`, `v_zero`: `[..][S][ceil(D/gv)]`.
#[derive(Debug, Clone, Copy)]
pub struct DenseCodes<'a> {
    /// Key codes, below `2^bits`.
    pub k_codes: &'a [u8],
    /// Key scales.
    pub k_scale: &'a [f16],
    /// Key zeros.
    pub k_zero: &'a [f16],
    /// Value codes, below `2^bits`.
    pub v_codes: &'a [u8],
    /// Value scales.
    pub v_scale: &'a [f16],
    /// Value zeros.
    pub v_zero: &'a [f16],
}

/// A packed K and V of `layers * batch` sequences of one length.
pub struct DenseKv {
    shape: LayerShape,
    layout: RecordLayout,
    layers: usize,
    batch: usize,
    kv_len: usize,
    /// `[layers][batch][kv_heads][groups]` records.
    records: Vec<u64>,
}

impl DenseKv {
    /// Packs the codes.
    ///
    /// # Errors
    /// [`Error::Dimension`] for bits or group_len outside the contract, [`Error::Shape`] for a slice of another length.
    pub fn from_codes(
        shape: LayerShape,
        bits: u32,
        group_len: usize,
        (layers, batch, kv_len): (usize, usize, usize),
        codes: &DenseCodes<'_>,
    ) -> Result<Self, Error> {
        if !BITS.contains(&bits) {
            return Err(Error::Dimension { what: "bits", got: bits as usize, supported: "2, 3, 4, 8" });
        }
        if !GROUP_LENS.contains(&group_len) {
            return Err(Error::Dimension { what: "group_len", got: group_len, supported: "32, 64, 128" });
        }
        let (d, s) = (shape.head_dim, kv_len);
        let layout = RecordLayout::from_parts(d, group_len, bits, bits);
        let (groups, v_groups) = (s.div_ceil(group_len), layout.v_groups());
        let heads = layers * batch * shape.kv_heads;
        check_len("length of k_codes", heads * s * d, codes.k_codes.len())?;
        check_len("length of v_codes", heads * s * d, codes.v_codes.len())?;
        check_len("length of k_scale", heads * groups * d, codes.k_scale.len())?;
        check_len("length of k_zero", heads * groups * d, codes.k_zero.len())?;
        check_len("length of v_scale", heads * s * v_groups, codes.v_scale.len())?;
        check_len("length of v_zero", heads * s * v_groups, codes.v_zero.len())?;
        for x in [codes.k_codes, codes.v_codes] {
            if let Some(&big) = x.iter().find(|&&c| u32::from(c) >> bits != 0) {
                return Err(Error::Dimension { what: "code", got: big as usize, supported: "below 2^bits" });
            }
        }
        let mut records = vec![0u64; heads * groups * layout.record_bytes / size_of::<u64>()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut records);
        for (i, record) in bytes.chunks_exact_mut(layout.record_bytes).enumerate() {
            let (head, group) = (i / groups, i % groups);
            let tokens = group * group_len..((group + 1) * group_len).min(s);
            let span = (head * s + tokens.start) * d..(head * s + tokens.end) * d;
            write_record_from_codes(
                &layout,
                &codes.k_codes[span.clone()],
                &codes.v_codes[span],
                |channel| {
                    let at = (head * groups + group) * d + channel;
                    Affine { scale: codes.k_scale[at], zero: codes.k_zero[at] }
                },
                |token, v_group| {
                    let at = (head * s + tokens.start + token) * v_groups + v_group;
                    Affine { scale: codes.v_scale[at], zero: codes.v_zero[at] }
                },
                record,
            );
        }
        Ok(Self { shape, layout, layers, batch, kv_len, records })
    }
}

struct DenseSource<'a> {
    kv: &'a DenseKv,
    /// Which of `[layers][batch]`.
    sequence: usize,
}

impl Source for DenseSource<'_> {
    fn record(&self, head: usize, group: usize) -> &[u8] {
        let groups = self.kv.kv_len.div_ceil(self.kv.layout.group_len);
        let at = (self.sequence * self.kv.shape.kv_heads + head) * groups + group;
        self.kv.layout.head(bytemuck::cast_slice(&self.kv.records), at)
    }

    fn f16_block(&self, _: usize, _: usize) -> (&[f16], &[f16]) {
        unreachable!("every position of a dense cache is packed")
    }

    fn bf16_block(&self, _: usize, _: usize) -> (&[bf16], &[bf16]) {
        unreachable!("every position of a dense cache is packed")
    }

    fn dequantized_block(&self, _: usize, _: usize) -> (&[f16], &[f16]) {
        unreachable!("records are always read directly")
    }

    fn sinks(&self, _: usize) -> (&[f16], &[f16]) {
        unreachable!("a dense cache has no sinks")
    }
}

impl Attention {
    /// Attends one query row per sequence of a dense cache, all layers in one call; bit-identical to a loop over layers.
    /// `options.first_visible`: empty, or one per batch entry.
    ///
    /// Shapes: `q`, `out`: f32 `[layers][batch][q_heads][head_dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`]; also for an empty cache.
    pub fn attend_dense(
        &mut self,
        kv: &DenseKv,
        q: &[f32],
        out: &mut [f32],
        options: &AttendOptions<'_>,
    ) -> Result<(), Error> {
        let n = kv.layers * kv.batch * kv.shape.q_heads * kv.shape.head_dim;
        check_len("length of q", n, q.len())?;
        check_len("length of out", n, out.len())?;
        check_options(options, kv.batch, kv.shape.q_heads)?;
        if kv.kv_len == 0 {
            return Err(Error::Shape { what: "tokens of a dense cache (1 or more)", expected: 1, got: 0 });
        }
        let sources: Vec<_> = (0..kv.layers * kv.batch).map(|sequence| DenseSource { kv, sequence }).collect();
        let problem = |(i, source)| Problem {
            source,
            shape: kv.shape,
            format: RowFormat::F16,
            records: Some(&kv.layout),
            sinks: 0,
            edge: &|position| position + 1,
            positions: kv.kv_len - 1..kv.kv_len,
            first_visible: options.first_visible.get(i % kv.batch).copied().unwrap_or(0),
            visible: None,
            first_row: i,
            sm_scale: options.sm_scale,
            softcap: options.softcap,
            sink_logits: options.sink_logits,
        };
        let problems: Vec<_> = sources.iter().map(|s| s as &dyn Source).enumerate().map(problem).collect();
        plan::run(self.variant, &self.threads, self.split, &problems, q, out);
        self.count("packed", kv.layers as u64);
        Ok(())
    }
}

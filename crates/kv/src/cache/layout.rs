//! Byte layout: the only place that computes offsets. In: a shape and a scheme; out: where each part lies.
//! docs/layout.md shows it by hand.
//! NOT here: bits inside a panel (quant/pack.rs), who owns the bytes (device/, store.rs).

use crate::codec::Codec;
use crate::element::Element;
use crate::quant::affine::Affine;
use crate::quant::codebook::Codebook;
use crate::quant::grid::Grid;
use crate::quant::pack::{PANEL_LANES, SLOT_LANES, panel_bytes};
use crate::scheme::Fit;
use crate::{LayerShape, PackedScheme, RowFormat};
use half::f16;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of one block of plain rows: one panel's lanes, and a divisor of every group_len.
pub(crate) const BLOCK_LEN: usize = 32;

/// The record of one (layer, kv head, group of tokens).
///
/// Parts, contiguous, in this order (G = group_len, D = head_dim, L = loud channels, V = number of channel groups):
/// 1. K params: scale f16 `[D]`, zero f16 `[D]`
/// 2. K codes: `G/32` panels of 32 lanes (tokens) x D + L rows: the channels, of a loud one the upper two bits of its code,
///    then the lower two bits of the loud ones
/// 3. V params: for each channel group: scale f16 `[G]`, zero f16 `[G]`
/// 4. V codes: `D/32` panels of 32 lanes (channels) x G rows (tokens); one more of 16 lanes when D is no multiple of 32
///
/// A half whose codec is a grid has one scale f16 per token `[G]` as its parameters. One of sub-vectors has none, and instead of
/// panels for each sub-vector the codes of all tokens: `[D/sub_len][G]` bytes, or with 16 centroids `[D/sub_len][G/2]` bytes, of
/// token t in the low half of byte t and of token `G/2 + t` in the high one; zeros fill the last line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RecordLayout {
    pub head_dim: usize,
    pub group_len: usize,
    pub k: Half,
    pub v: Half,
    /// Bits of a code in a panel (0: there are no panels).
    pub k_bits: u32,
    pub v_bits: u32,
    /// Channels, the first ones, whose key codes have 4 bits in two planes of 2.
    pub loud: usize,
    /// How scales and zeros are chosen.
    pub fit: Fit,
    /// Channels of a value group (the last may be shorter).
    pub v_group_len: usize,
    k_codes: usize,
    v_params: usize,
    v_codes: usize,
    pub record_bytes: usize,
}

/// What one half of a record, keys or values, is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Half {
    /// Groups with scale and zero.
    Groups,
    /// Rows with one scale.
    Grid(Box<Grid>),
    /// Sub-vectors: a codebook for each kv head, or one for all.
    Vectors(Arc<[Codebook]>),
}

impl Half {
    /// With the codebook of normal channels, where one is needed.
    fn of(codec: Codec, head_dim: usize) -> Self {
        match (codec, Grid::of(codec)) {
            (_, Some(grid)) => Half::Grid(Box::new(grid)),
            (Codec::Vector { centroids, sub_len }, _) => {
                Half::Vectors([Codebook::of_normal(head_dim, centroids, sub_len)].into())
            }
            _ => Half::Groups,
        }
    }

    /// Whether it is groups with scale and zero.
    pub(crate) fn is_groups(&self) -> bool {
        matches!(self, Half::Groups)
    }

    /// Bits of a code in a panel; 0 without panels.
    fn bits(&self, codec: Codec) -> u32 {
        match (self, codec) {
            (Half::Grid(grid), _) => grid.bits,
            (_, Codec::Affine { bits, .. }) => bits,
            _ => 0,
        }
    }
}

/// A head's codebook.
pub(crate) fn book(books: &[Codebook], head: usize) -> &Codebook {
    &books[head % books.len()]
}

/// Bytes of one scale or zero.
const PARAM_BYTES: usize = 2;

impl RecordLayout {
    pub(crate) fn new(head_dim: usize, scheme: &PackedScheme) -> Self {
        let (group_len, (k, v)) = (scheme.group_len(), (scheme.k(), scheme.v()));
        let halves = [k, v].map(|codec| Half::of(codec, head_dim));
        let [k_bits, v_bits] = [(&halves[0], k), (&halves[1], v)].map(|(half, codec)| half.bits(codec));
        // Parameters of a half in bytes; those of affine halves are several per channel or token.
        let params = |half: &Half, affine: usize| match half {
            Half::Groups => affine,
            Half::Grid(_) => PARAM_BYTES * group_len,
            Half::Vectors(_) => 0,
        };
        let v_group_len = if halves[1].is_groups() { group_len.min(head_dim) } else { head_dim };
        let (k_bytes, v_bytes) = scheme.record_bytes(head_dim);
        let k_codes = params(&halves[0], 2 * PARAM_BYTES * head_dim);
        let v_params = k_bytes;
        let v_codes = v_params + params(&halves[1], 2 * PARAM_BYTES * group_len * head_dim.div_ceil(v_group_len));
        let record_bytes = v_params + v_bytes;
        let [k, v] = halves;
        let (loud, fit) = (scheme.loud_channels(head_dim), scheme.fit());
        Self {
            head_dim,
            group_len,
            k,
            v,
            k_bits,
            v_bits,
            loud,
            fit,
            v_group_len,
            k_codes,
            v_params,
            v_codes,
            record_bytes,
        }
    }

    /// Without loud channels.
    pub(crate) fn from_parts(head_dim: usize, group_len: usize, k_bits: u32, v_bits: u32) -> Self {
        let scheme = PackedScheme::new(k_bits, v_bits, group_len, 0, 0, 0).expect("checked by the callers");
        Self::new(head_dim, &scheme)
    }

    /// Rows of a key panel: channels, and once more the loud ones.
    pub(crate) fn k_rows(&self) -> usize {
        self.head_dim + self.loud
    }

    /// Bits of the code of a key channel.
    pub(crate) fn k_bits_of(&self, channel: usize) -> u32 {
        if channel < self.loud { 2 * self.k_bits } else { self.k_bits }
    }

    /// Bytes of the block that holds one group of every kv head.
    pub(crate) fn block_bytes(&self, kv_heads: usize) -> usize {
        self.record_bytes * kv_heads
    }

    /// One head's record in such a block, or in any row of records.
    pub(crate) fn head<'a>(&self, records: &'a [u8], head: usize) -> &'a [u8] {
        &records[head * self.record_bytes..][..self.record_bytes]
    }

    /// Number of channel groups of a value row.
    pub(crate) fn v_groups(&self) -> usize {
        self.head_dim.div_ceil(self.v_group_len)
    }

    /// Channels of value group `group`.
    pub(crate) fn v_channels(&self, group: usize) -> Range<usize> {
        group * self.v_group_len..((group + 1) * self.v_group_len).min(self.head_dim)
    }

    /// Scales of the keys of a grid, one per token: `[G]`.
    pub(crate) fn k_scales<'a>(&self, record: &'a [u8]) -> &'a [f16] {
        bytemuck::cast_slice(&record[..self.k_codes])
    }

    /// See [`RecordLayout::k_scales`].
    pub(crate) fn k_scales_mut<'a>(&self, record: &'a mut [u8]) -> &'a mut [f16] {
        bytemuck::cast_slice_mut(&mut record[..self.k_codes])
    }

    /// Scales of the values of a grid, one per token: `[G]`.
    pub(crate) fn v_scales<'a>(&self, record: &'a [u8]) -> &'a [f16] {
        bytemuck::cast_slice(&record[self.v_params..self.v_codes])
    }

    /// See [`RecordLayout::v_scales`].
    pub(crate) fn v_scales_mut<'a>(&self, record: &'a mut [u8]) -> &'a mut [f16] {
        bytemuck::cast_slice_mut(&mut record[self.v_params..self.v_codes])
    }

    /// Where all codes of the values are.
    pub(crate) fn all_v_codes(&self) -> Range<usize> {
        self.v_codes..self.record_bytes
    }

    /// Scales and zeros of the keys, one per channel: `[D]` each.
    pub(crate) fn k_params<'a>(&self, record: &'a [u8]) -> (&'a [f16], &'a [f16]) {
        params(&record[..self.k_codes], self.head_dim)
    }

    /// Scales and zeros of value group `group`, one per token: `[G]` each.
    pub(crate) fn v_params<'a>(&self, record: &'a [u8], group: usize) -> (&'a [f16], &'a [f16]) {
        let bytes = 2 * PARAM_BYTES * self.group_len;
        params(&record[self.v_params + group * bytes..][..bytes], self.group_len)
    }

    /// Where the key half of a record begins and ends.
    pub(crate) fn k_bytes(&self) -> Range<usize> {
        0..self.v_params
    }

    /// Where the value half of a record begins and ends.
    pub(crate) fn v_bytes(&self) -> Range<usize> {
        self.v_params..self.record_bytes
    }

    /// Where the codes of the keys are: panels whose lanes are tokens.
    pub(crate) fn k_codes(&self) -> Range<usize> {
        self.k_codes..self.v_params
    }

    /// Where the codes of value group `group` are: panels whose lanes are channels.
    pub(crate) fn v_codes(&self, group: usize) -> Range<usize> {
        let channels = self.v_channels(group);
        let at = |channel| self.v_codes + panel_bytes(self.v_bits, channel, self.group_len);
        at(channels.start)..at(channels.end)
    }

    /// Panels of the keys: lanes are tokens.
    pub(crate) fn k_panels(&self) -> impl Iterator<Item = Panel> + use<> {
        panels(self.k_codes, self.k_bits, self.group_len, self.k_rows())
    }

    /// Panels of the values: lanes are channels.
    pub(crate) fn v_panels(&self) -> impl Iterator<Item = Panel> + use<> {
        panels(self.v_codes, self.v_bits, self.head_dim, self.group_len)
    }

    /// See [`RecordLayout::k_params`].
    pub(crate) fn k_params_mut<'a>(&self, record: &'a mut [u8]) -> (&'a mut [f16], &'a mut [f16]) {
        params_mut(&mut record[..self.k_codes], self.head_dim)
    }

    /// See [`RecordLayout::v_params`].
    pub(crate) fn v_params_mut<'a>(&self, record: &'a mut [u8], group: usize) -> (&'a mut [f16], &'a mut [f16]) {
        let bytes = 2 * PARAM_BYTES * self.group_len;
        params_mut(&mut record[self.v_params + group * bytes..][..bytes], self.group_len)
    }

    /// Writes the key parameters of a channel.
    pub(crate) fn set_k_params(&self, record: &mut [u8], channel: usize, affine: Affine) {
        let (scales, zeros) = self.k_params_mut(record);
        (scales[channel], zeros[channel]) = (affine.scale, affine.zero);
    }

    /// Writes the value parameters of a token in a channel group.
    pub(crate) fn set_v_params(&self, record: &mut [u8], group: usize, token: usize, affine: Affine) {
        let (scales, zeros) = self.v_params_mut(record, group);
        (scales[token], zeros[token]) = (affine.scale, affine.zero);
    }
}

/// One panel of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Panel {
    pub bytes: Range<usize>,
    /// First token (keys) or channel (values).
    pub first_lane: usize,
    /// 32, or 16 for the last value panel of head_dim 80.
    pub lanes: usize,
}

fn panels(start: usize, bits: u32, lanes_in_all: usize, rows: usize) -> impl Iterator<Item = Panel> {
    (0..lanes_in_all.div_ceil(PANEL_LANES)).map(move |i| {
        let lanes = PANEL_LANES.min(lanes_in_all - i * PANEL_LANES);
        debug_assert!(lanes.is_multiple_of(SLOT_LANES));
        let from = start + i * panel_bytes(bits, PANEL_LANES, rows);
        Panel { bytes: from..from + panel_bytes(bits, lanes, rows), first_lane: i * PANEL_LANES, lanes }
    })
}

fn params(bytes: &[u8], n: usize) -> (&[f16], &[f16]) {
    bytemuck::cast_slice(bytes).split_at(n)
}

fn params_mut(bytes: &mut [u8], n: usize) -> (&mut [f16], &mut [f16]) {
    bytemuck::cast_slice_mut(bytes).split_at_mut(n)
}

/// A block of plain rows (f16 or bf16) of one layer: for each kv head K `[D][tokens]` (transposed: lanes are tokens, as in a
/// panel), then V `[tokens][D]`. `tokens` is 32. The sink block has the same shape with `tokens` = sinks, but K as
/// `[tokens][D]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlainLayout {
    pub head_dim: usize,
    pub tokens: usize,
    pub format: RowFormat,
}

/// Bytes of one number of either format.
const ELEMENT_BYTES: usize = 2;

impl PlainLayout {
    pub(crate) fn block(shape: &LayerShape, format: RowFormat) -> Self {
        Self { head_dim: shape.head_dim, tokens: BLOCK_LEN, format }
    }

    /// Bytes of the block that holds K and V of every kv head.
    pub(crate) fn block_bytes(&self, kv_heads: usize) -> usize {
        self.head_bytes() * kv_heads
    }

    /// Bytes of one head's K and V.
    fn head_bytes(&self) -> usize {
        2 * self.tensor_bytes()
    }

    fn tensor_bytes(&self) -> usize {
        self.tokens * self.head_dim * ELEMENT_BYTES
    }

    /// K `[D][tokens]` and V `[tokens][D]` of one head; E is of the layout's format.
    pub(crate) fn head<'a, E: Element>(&self, block: &'a [u8], head: usize) -> (&'a [E], &'a [E]) {
        debug_assert_eq!(E::FORMAT, self.format);
        let bytes = &block[head * self.head_bytes()..][..self.head_bytes()];
        bytemuck::cast_slice(bytes).split_at(self.tokens * self.head_dim)
    }

    /// See [`PlainLayout::head`].
    pub(crate) fn head_mut<'a, E: Element>(&self, block: &'a mut [u8], head: usize) -> (&'a mut [E], &'a mut [E]) {
        debug_assert_eq!(E::FORMAT, self.format);
        let bytes = &mut block[head * self.head_bytes()..][..self.head_bytes()];
        bytemuck::cast_slice_mut(bytes).split_at_mut(self.tokens * self.head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scheme;

    #[test]
    fn record_bytes_are_the_effective_bits() {
        for d in crate::shape::HEAD_DIMS {
            for text in [
                "k4v4g64",
                "k2v8g32",
                "k3v2g128",
                "k8v3g64",
                "k2l8v2g64",
                "k2l4v3g32",
                "k2l2v2g128",
                "ktq3vtq1g32",
                "ksb1v4g64",
                "krvq21vsb2g128",
                "k4vtq4g32",
            ] {
                let scheme: Scheme = text.parse().unwrap();
                let p = scheme.packed().unwrap();
                let l = RecordLayout::new(d, p);
                let bits = 2.0 * scheme.bits_per_element(d) * (d * p.group_len()) as f64;
                assert!((l.record_bytes as f64 - bits / 8.0).abs() < 1e-6, "{text} {d}");
                assert_eq!(l.record_bytes % 64, 0);
                let k: Vec<_> = l.k_panels().collect();
                let v: Vec<_> = l.v_panels().collect();
                let params = if l.k.is_groups() { 4 * d } else { 2 * l.group_len };
                assert_eq!(k[0].bytes.start, params);
                assert_eq!(k.last().unwrap().bytes.end, l.v_params);
                assert_eq!(v[0].bytes.start, l.v_codes);
                assert_eq!(v.last().unwrap().bytes.end, l.record_bytes);
                assert_eq!(v.iter().map(|p| p.lanes).sum::<usize>(), d);
            }
        }
    }

    #[test]
    fn the_example_of_the_layout_page() {
        let l = RecordLayout::from_parts(64, 32, 4, 4);
        assert_eq!((l.k_codes, l.v_params, l.v_codes, l.record_bytes), (256, 1280, 1536, 2560));
        let l = RecordLayout::from_parts(80, 64, 4, 4);
        assert_eq!(l.v_groups(), 2);
        assert_eq!(l.v_channels(1), 64..80);
        assert_eq!(l.v_panels().map(|p| p.lanes).collect::<Vec<_>>(), [32, 32, 16]);
    }
}

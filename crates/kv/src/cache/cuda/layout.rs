//! The GPU's record and tile order in numbers: the same map as record.cuh beside this file, which the kernels use. In: head_dim,
//! group_len and bits; out: sizes, and records of one order turned into the other.
//! NOT here: what codes mean (quant/), which device memory they lie in (mod.rs).

#[cfg(test)]
use crate::append::record::read_panels;
#[cfg(test)]
use crate::cache::layout::RecordLayout;
#[cfg(test)]
use half::f16;

/// Lanes of a warp.
const LANES: usize = 32;
/// Tokens of a tile of plain rows.
pub(crate) const TILE_LEN: usize = 16;

/// Sizes of a GPU record, in the names of record.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RecordShape {
    pub head_dim: usize,
    pub group_len: usize,
    /// 0: nothing is packed.
    pub k_bits: u32,
    pub v_bits: u32,
}

impl RecordShape {
    /// A plain cache: only tiles.
    pub(crate) fn plain(head_dim: usize) -> Self {
        Self { head_dim, group_len: 64, k_bits: 0, v_bits: 0 }
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.k_bits == 0
    }

    /// Slices of 16 channels, an even number.
    pub(crate) fn slices(&self) -> usize {
        2 * self.head_dim.div_ceil(32)
    }

    pub(crate) fn channels(&self) -> usize {
        16 * self.slices()
    }

    /// Tiles of 16 tokens in a part.
    pub(crate) fn tiles(&self) -> usize {
        let bits = (self.k_bits + self.v_bits) as usize;
        let mut tiles = 4;
        while tiles > 1 && (tiles * 2 * self.channels() * bits > 4096 || tiles * 16 > self.group_len) {
            tiles /= 2;
        }
        tiles
    }

    fn part_len(&self) -> usize {
        16 * self.tiles()
    }

    pub(crate) fn parts(&self) -> usize {
        self.group_len / self.part_len()
    }

    fn words(&self, bits: u32) -> usize {
        let (slices, tiles) = (self.slices(), self.tiles());
        match bits {
            2 => slices / 2 * tiles,
            3 => 3 * tiles * slices.div_ceil(4),
            4 => slices * tiles,
            _ => 2 * slices * tiles,
        }
    }

    fn v_group_len(&self) -> usize {
        self.group_len.min(self.head_dim)
    }

    pub(crate) fn v_groups(&self) -> usize {
        self.head_dim.div_ceil(self.v_group_len())
    }

    pub(crate) fn k_param_bytes(&self) -> usize {
        self.slices() * 4 * 16
    }

    fn code_bytes(&self, bits: u32) -> usize {
        self.words(bits) * LANES * 4
    }

    pub(crate) fn part_bytes(&self) -> usize {
        self.code_bytes(self.k_bits) + self.code_bytes(self.v_bits) + self.tiles() * self.v_groups() * 4 * 16
    }

    /// Bytes of a record; 0 when nothing is packed.
    pub(crate) fn record_bytes(&self) -> usize {
        if self.is_plain() { 0 } else { self.k_param_bytes() + self.parts() * self.part_bytes() }
    }

    /// Bytes of the keys (or the values) of a plain tile.
    pub(crate) fn tile_half_bytes(&self) -> usize {
        self.slices() * LANES * 16
    }

    /// Bytes of a plain tile.
    pub(crate) fn tile_bytes(&self) -> usize {
        2 * self.tile_half_bytes()
    }
}

/// Where each number of a record lies, and records of the CPU's order turned into the GPU's.
#[cfg(test)]
impl RecordShape {
    fn word_at(words: usize, word: usize, lane: usize) -> usize {
        let (quad, rest) = (word / 4 * 512, word % 4 * 4);
        if word < words / 4 * 4 { quad + lane * 16 + rest } else { quad + lane * 8 + rest }
    }

    /// Where the bits of one code of a part lie: (byte of a word in the codes, first bit, bits) of its lower bits, and of its third
    /// bit when it has three. `keys`: which operand; `token` within the part.
    fn code_places(&self, bits: u32, keys: bool, token: usize, channel: usize) -> [Option<(usize, u32, u32)>; 2] {
        let (tile, token, slice, channel) = (token / 16, token % 16, channel / 16, channel % 16);
        let (g, t, s, q, h) = if keys {
            (token % 8, channel / 4, token / 8, channel % 4 / 2, channel % 2)
        } else {
            (channel % 8, token % 8 / 2, token / 8, channel / 8, token % 2)
        };
        let (words, tiles, lane, (s, q, h)) =
            (self.words(bits), self.tiles(), g * 4 + t, (s as u32, q as u32, h as u32));
        let at = |word: usize| Self::word_at(words, word, lane);
        let (f, l) = (slice as u32 % 2, slice / 2 % 2);
        match bits {
            2 => [Some((at(slice / 2 * tiles + tile), 16 * h + 8 * s + 4 * f + 2 * q, 2)), None],
            3 => {
                let first = (slice / 4 * tiles + tile) * 3;
                let low = (at(first + l), 16 * h + 8 * s + 4 * f + 2 * q, 2);
                [Some(low), Some((at(first + 2), 16 * h + 8 * l as u32 + s + 2 * (2 * f + q), 1))]
            }
            4 => [Some((at(slice * tiles + tile), 16 * h + 8 * s + 4 * q, 4)), None],
            _ => [Some((at((slice * tiles + tile) * 2 + q as usize), 16 * h + 8 * s, 8)), None],
        }
    }

    /// Bytes of the code of a token and channel: where its part's codes of this operand begin.
    fn codes_start(&self, keys: bool, token: usize) -> usize {
        let part = self.k_param_bytes() + token / self.part_len() * self.part_bytes();
        if keys { part } else { part + self.code_bytes(self.k_bits) }
    }

    fn k_param_at(&self, channel: usize) -> usize {
        (channel / 16 * 4 + channel % 16 / 4) * 16 + channel % 4 * 2
    }

    fn v_param_at(&self, token: usize, group: usize) -> usize {
        let part = self.k_param_bytes() + (token / self.part_len() + 1) * self.part_bytes();
        let params = part - self.tiles() * self.v_groups() * 64;
        let (tile, of_tile) = (token % self.part_len() / 16, token % 16);
        params + ((tile * self.v_groups() + group) * 4 + of_tile % 8 / 2) * 16 + of_tile / 8 * 4 + of_tile % 2 * 2
    }

    fn put_code(&self, record: &mut [u8], keys: bool, token: usize, channel: usize, code: u8) {
        let bits = if keys { self.k_bits } else { self.v_bits };
        let start = self.codes_start(keys, token);
        let places = self.code_places(bits, keys, token % self.part_len(), channel);
        let mut rest = u32::from(code);
        for (byte, bit, n) in places.into_iter().flatten() {
            record[start + byte + bit as usize / 8] |= ((rest & ((1 << n) - 1)) << (bit % 8)) as u8;
            rest >>= n;
        }
    }

    fn code(&self, record: &[u8], keys: bool, token: usize, channel: usize) -> u8 {
        let bits = if keys { self.k_bits } else { self.v_bits };
        let start = self.codes_start(keys, token);
        let (mut code, mut have) = (0, 0);
        for (byte, bit, n) in self.code_places(bits, keys, token % self.part_len(), channel).into_iter().flatten() {
            let x = u32::from(record[start + byte + bit as usize / 8]) >> (bit % 8) & ((1 << n) - 1);
            code |= x << have;
            have += n;
        }
        code as u8
    }

    /// A GPU record of the codes and parameters of a CPU record.
    pub(crate) fn record_of(&self, layout: &RecordLayout, cpu: &[u8]) -> Vec<u8> {
        let (d, g) = (self.head_dim, self.group_len);
        let mut record = vec![0; self.record_bytes()];
        let (k, v) = cpu_codes(layout, cpu);
        let put = |record: &mut [u8], at: usize, scale: f16, zero: f16| {
            record[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            record[at + 8..at + 10].copy_from_slice(&zero.to_le_bytes());
        };
        let (scales, zeros) = layout.k_params(cpu);
        for channel in 0..d {
            put(&mut record, self.k_param_at(channel), scales[channel], zeros[channel]);
        }
        for group in 0..self.v_groups() {
            let (scales, zeros) = layout.v_params(cpu, group);
            for token in 0..g {
                put(&mut record, self.v_param_at(token, group), scales[token], zeros[token]);
            }
        }
        for token in 0..g {
            for channel in 0..d {
                self.put_code(&mut record, true, token, channel, k[token * d + channel]);
                self.put_code(&mut record, false, token, channel, v[token * d + channel]);
            }
        }
        record
    }

    /// Codes and parameters of a GPU record.
    pub(crate) fn read(&self, record: &[u8]) -> Unpacked {
        let (d, g) = (self.head_dim, self.group_len);
        let two = |at: usize| f16::from_le_bytes([record[at], record[at + 1]]);
        let pair = |at: usize| (two(at), two(at + 8));
        let codes = |keys: bool| (0..g * d).map(|i| self.code(record, keys, i / d, i % d)).collect();
        Unpacked {
            k_codes: codes(true),
            v_codes: codes(false),
            k_params: (0..d).map(|channel| pair(self.k_param_at(channel))).collect(),
            v_params: (0..g * self.v_groups())
                .map(|i| pair(self.v_param_at(i / self.v_groups(), i % self.v_groups())))
                .collect(),
        }
    }

    /// The same of a CPU record.
    pub(crate) fn read_cpu(&self, layout: &RecordLayout, cpu: &[u8]) -> Unpacked {
        let (k_codes, v_codes) = cpu_codes(layout, cpu);
        let (scales, zeros) = layout.k_params(cpu);
        let k_params = scales.iter().copied().zip(zeros.iter().copied()).collect();
        let value = |i: usize| {
            let (scales, zeros) = layout.v_params(cpu, i % self.v_groups());
            (scales[i / self.v_groups()], zeros[i / self.v_groups()])
        };
        let v_params = (0..self.group_len * self.v_groups()).map(value).collect();
        Unpacked { k_codes, v_codes, k_params, v_params }
    }
}

/// What a record holds, in no device's order.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Unpacked {
    /// `[group_len][head_dim]`
    pub k_codes: Vec<u8>,
    /// `[group_len][head_dim]`
    pub v_codes: Vec<u8>,
    /// Scale and zero, `[head_dim]`.
    pub k_params: Vec<(f16, f16)>,
    /// Scale and zero, `[group_len][v_groups]`.
    pub v_params: Vec<(f16, f16)>,
}

/// Codes of a CPU record: keys and values, `[group_len][head_dim]`.
#[cfg(test)]
fn cpu_codes(layout: &RecordLayout, record: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let of_channels = read_panels(layout.k_bits, layout.k_panels(), layout.k_rows(), record, g);
    let k = (0..g * d).map(|i| of_channels[i % d * g + i / d]).collect();
    (k, read_panels(layout.v_bits, layout.v_panels(), g, record, d))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::append::record::write_record_from_codes;
    use crate::quant::affine::Affine;
    use crate::scheme::{BITS, GROUP_LENS};
    use crate::shape::HEAD_DIMS;

    /// A CPU record of numbers that differ everywhere.
    fn cpu_record(layout: &RecordLayout) -> Vec<u8> {
        let (d, g) = (layout.head_dim, layout.group_len);
        let codes = |bits: u32, salt: usize| -> Vec<u8> {
            (0..g * d).map(|i| ((i * 2654435761 + salt) >> 9) as u8 & ((1u32 << bits) - 1) as u8).collect()
        };
        let affine = |i: usize| Affine { scale: f16::from_f32(1.0 + i as f32), zero: f16::from_f32(-0.5 - i as f32) };
        let mut words = vec![0u64; layout.record_bytes / 8];
        let record: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let (k, v) = (codes(layout.k_bits, 1), codes(layout.v_bits, 77));
        let value = |token: usize, group: usize| affine(300 + token * 8 + group);
        write_record_from_codes(layout, &k, &v, affine, value, record);
        record.to_vec()
    }

    #[test]
    fn a_record_survives_both_orders() {
        for head_dim in HEAD_DIMS {
            for group_len in GROUP_LENS {
                for (k_bits, v_bits) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
                    let layout = RecordLayout::from_parts(head_dim, group_len, k_bits, v_bits);
                    let shape = RecordShape { head_dim, group_len, k_bits, v_bits };
                    let cpu = cpu_record(&layout);
                    let gpu = shape.record_of(&layout, &cpu);
                    assert_eq!(gpu.len(), shape.record_bytes());
                    let what = format!("d{head_dim} g{group_len} k{k_bits} v{v_bits}");
                    assert!(shape.read(&gpu) == shape.read_cpu(&layout, &cpu), "{what}");
                }
            }
        }
    }

    /// The formula of effective bits, but where channels are padded: head_dim 80 as 96, and 3-bit slices in fours.
    #[test]
    fn records_take_the_bytes_of_the_formula() {
        for head_dim in [64, 128, 256] {
            for group_len in GROUP_LENS {
                for (k_bits, v_bits) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
                    let layout = RecordLayout::from_parts(head_dim, group_len, k_bits, v_bits);
                    let shape = RecordShape { head_dim, group_len, k_bits, v_bits };
                    assert_eq!(
                        shape.record_bytes(),
                        layout.record_bytes,
                        "d{head_dim} g{group_len} k{k_bits} v{v_bits}"
                    );
                    assert_eq!(shape.record_bytes() % 16, 0, "the copy engine moves 16 bytes at least");
                }
            }
        }
        let shape = RecordShape { head_dim: 96, group_len: 64, k_bits: 4, v_bits: 4 };
        assert_eq!(shape.record_bytes(), RecordLayout::from_parts(96, 64, 4, 4).record_bytes);
    }

    #[test]
    fn words_come_in_fours_or_twos() {
        for head_dim in HEAD_DIMS {
            for group_len in GROUP_LENS {
                for (k_bits, v_bits) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
                    let shape = RecordShape { head_dim, group_len, k_bits, v_bits };
                    assert!(shape.words(k_bits).is_multiple_of(2) && shape.words(v_bits).is_multiple_of(2));
                    assert!(shape.parts() * shape.part_len() == group_len);
                }
            }
        }
    }
}

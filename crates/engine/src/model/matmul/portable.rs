//! Portable product: plain integers on arrays. Integers of an activation block are stored as 32 i16.
//! NOT here: layout (mod.rs).

use super::{Activations, BLOCK, Format, Line, TILE, Tile};

/// Stores 32 integers as little-endian i16.
pub(super) fn store(integers: &[i16; BLOCK], line: &mut Line) {
    for (bytes, i) in line.0.chunks_exact_mut(2).zip(integers) {
        bytes.copy_from_slice(&i.to_le_bytes());
    }
}

/// See `Kernel::multiply`.
pub(super) fn multiply(tile: &Tile<'_>, x: &Activations, out: &mut [[f32; TILE]]) {
    let lines_per_block = tile.format.lines();
    for (r, out) in out.iter_mut().enumerate() {
        *out = [0.0; TILE];
        for b in 0..x.blocks {
            let at = r * x.blocks + b;
            let integers: [i32; BLOCK] = std::array::from_fn(|i| {
                let bytes = &x.integers[at].0;
                i16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]) as i32
            });
            let mut sums = [0i32; TILE];
            for (i, line) in tile.lines[b * lines_per_block..][..lines_per_block].iter().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    for j in 0..4 {
                        let code = line.0[4 * c + j] as i32;
                        *sum += match tile.format {
                            Format::Affine4 => {
                                (code & 15) * integers[4 * i + j] + (code >> 4) * integers[16 + 4 * i + j]
                            }
                            Format::Offset8 => code * integers[4 * i + j],
                        };
                    }
                }
            }
            let params = &tile.params[b];
            for c in 0..TILE {
                out[c] += sums[c] as f32 * (params.scale[c].to_f32() * x.steps[at]);
                out[c] += params.min[c].to_f32() * x.sums[at];
            }
        }
    }
}

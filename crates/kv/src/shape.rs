//! Shapes of attention layers. In: numbers from a model's configuration; out: checked shapes.
//! NOT here: how tokens are stored (scheme.rs) or where bytes lie (cache/layout.rs).

use crate::Error;

/// Head dimensions the kernels take.
pub const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Largest q_heads / kv_heads.
pub const MAX_GQA_RATIO: usize = 16;

/// Shape of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerShape {
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads; query head `h` reads kv head `h / (q_heads / kv_heads)`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

impl LayerShape {
    /// A checked shape.
    ///
    /// # Errors
    /// [`Error::Dimension`] for a head_dim outside [`HEAD_DIMS`], or heads whose ratio is not a whole number in 1..=16.
    pub fn new(q_heads: usize, kv_heads: usize, head_dim: usize) -> Result<Self, Error> {
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::Dimension { what: "head_dim", got: head_dim, supported: "64, 80, 96, 128, 256" });
        }
        if kv_heads == 0 {
            return Err(Error::Dimension { what: "kv_heads", got: 0, supported: "1 or more" });
        }
        if q_heads == 0 || !q_heads.is_multiple_of(kv_heads) || q_heads / kv_heads > MAX_GQA_RATIO {
            return Err(Error::Dimension {
                what: "q_heads",
                got: q_heads,
                supported: "kv_heads times a whole number from 1 to 16",
            });
        }
        Ok(Self { q_heads, kv_heads, head_dim })
    }

    /// Query heads that share one kv head.
    pub fn gqa_ratio(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Elements of one token's K (or V) row over all kv heads.
    pub fn row_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_outside_the_contract_are_refused() {
        assert!(LayerShape::new(32, 8, 128).is_ok());
        assert!(LayerShape::new(16, 1, 64).is_ok());
        for (q, kv, d) in [(17, 1, 64), (9, 2, 64), (0, 1, 64), (8, 0, 64), (8, 2, 72)] {
            assert!(LayerShape::new(q, kv, d).is_err(), "{q}/{kv}/{d}");
        }
    }
}

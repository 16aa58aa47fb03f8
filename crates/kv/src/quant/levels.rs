//! Codebooks of a standard normal. Written by tests/golden/codebooks.py, which says how; not by hand.

/// Levels of the codes, about 127.5, and what one unit is in standard deviations.
pub(crate) struct Levels {
    pub levels: &'static [u8],
    pub unit: f32,
}

/// 1 bits: mean squared error 0.363380 (exact centroids 0.363380).
pub(crate) const LLOYD_1: Levels = Levels { levels: &[0, 255], unit: 6.257918e-03 };

/// 2 bits: mean squared error 0.117488 (exact centroids 0.117482).
pub(crate) const LLOYD_2: Levels = Levels { levels: &[0, 89, 166, 255], unit: 1.1846413e-02 };

/// 3 bits: mean squared error 0.034551 (exact centroids 0.034548).
pub(crate) const LLOYD_3: Levels = Levels { levels: &[0, 48, 83, 113, 142, 172, 207, 255], unit: 1.6878005e-02 };

/// 4 bits: mean squared error 0.009541 (exact centroids 0.009501).
pub(crate) const LLOYD_4: Levels =
    Levels { levels: &[0, 31, 52, 69, 84, 97, 109, 122, 133, 146, 158, 171, 186, 203, 224, 255], unit: 2.1432076e-02 };

/// 1+1 bits in two stages: mean squared error 0.130375 (exact centroids 0.130454).
pub(crate) const RESIDUAL_1_1: Levels = Levels { levels: &[0, 96, 159, 255], unit: 1.0043206e-02 };

/// 2+1 bits in two stages: mean squared error 0.041684 (exact centroids 0.041688).
pub(crate) const RESIDUAL_2_1: Levels = Levels { levels: &[0, 39, 76, 115, 140, 179, 216, 255], unit: 1.4005684e-02 };

/// 2+2 bits in two stages: mean squared error 0.019541 (exact centroids 0.019646).
pub(crate) const RESIDUAL_2_2: Levels =
    Levels { levels: &[0, 20, 39, 59, 69, 88, 108, 127, 128, 147, 167, 186, 196, 216, 235, 255], unit: 1.5385698e-02 };

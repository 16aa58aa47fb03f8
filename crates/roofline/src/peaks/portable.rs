//! Arithmetic in plain Rust: what a compiler makes of it for the oldest processor of this kind. A lower bound of the
//! machine's peak, and reported as one. NOT here: instruction sets.

/// Independent chains, so that no addition waits for the one before it.
const CHAINS: usize = 8;
/// Numbers of a chain: whole vectors of any width.
const LANES: usize = 16;

/// Operations of one iteration of either function.
pub(super) const OPS: u64 = 2 * (CHAINS * LANES) as u64;

/// f32 multiply, then add (a fused one would be a library call where the compiler may not assume the instruction).
pub(super) fn mul_add(iterations: u64) -> f32 {
    let mut sums = [[1.0f32; LANES]; CHAINS];
    let (factor, term) = std::hint::black_box((0.999_f32, 0.01_f32));
    for _ in 0..iterations {
        sums.iter_mut().flatten().for_each(|x| *x = *x * factor + term);
    }
    sums.iter().flatten().sum()
}

/// Products of 8-bit numbers, summed in 32 bits.
pub(super) fn int8_dot(iterations: u64) -> f32 {
    let mut sums = [[1i32; LANES]; CHAINS];
    let factor = i32::from(std::hint::black_box(3_i8));
    for _ in 0..iterations {
        // The factor is taken from the sum, so that the product cannot be computed once and for all.
        sums.iter_mut().flatten().for_each(|x| *x = x.wrapping_add(i32::from(*x as i8) * factor));
    }
    sums.iter().flatten().fold(0i32, |a, &b| a.wrapping_add(b)) as f32
}

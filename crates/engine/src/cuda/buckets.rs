//! How many rows a step is computed with. In: rows there are; out: rows of the next prepared size.
//! NOT here: what is prepared for a size (step.rs, products.rs).

/// Sizes that steps are prepared for. Small ones are near each other: there a row more costs time.
pub const BUCKETS: [usize; 20] =
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048];

/// Rows of the largest chunk of a prompt.
pub const CHUNK: usize = BUCKETS[BUCKETS.len() - 1];

/// The smallest size that has room for these rows; None above [`CHUNK`].
pub fn bucket(rows: usize) -> Option<usize> {
    BUCKETS.into_iter().find(|&size| size >= rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_has_the_next_size() {
        assert_eq!([1, 2, 3, 8, 9, 25, 64, 65, 2048].map(|n| bucket(n).unwrap()), [1, 2, 4, 8, 16, 32, 64, 96, 2048]);
        assert_eq!(bucket(CHUNK + 1), None);
        assert!(BUCKETS.is_sorted());
    }
}

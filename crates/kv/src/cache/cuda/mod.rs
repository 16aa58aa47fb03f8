//! How a cache lies on a GPU: record.cuh and layout.rs are the order of bytes, extent.cuh and [`Rule`] which keys are where. In: shapes
//! and schemes; out: numbers, and the headers and definitions that kernels are compiled with.
//! NOT here: memory (cuda/), kernels (append/cuda, attend/cuda).

pub(crate) mod layout;

use cudarc::driver::DeviceRepr;
use layout::RecordShape;

/// Headers of all kernels that know records.
pub(crate) const HEADERS: &[(&str, &str)] = &[
    ("ptx.cuh", include_str!("ptx.cuh")),
    ("record.cuh", include_str!("record.cuh")),
    ("extent.cuh", include_str!("extent.cuh")),
];

/// What record.cuh needs to know.
pub(crate) fn record_defines(record: &RecordShape) -> Vec<String> {
    let bits = |bits: u32| if record.is_plain() { 16 } else { bits };
    vec![
        format!("HEAD_DIM={}", record.head_dim),
        format!("GROUP_LEN={}", record.group_len),
        format!("K_BITS={}", bits(record.k_bits)),
        format!("V_BITS={}", bits(record.v_bits)),
    ]
}

/// `Rule` of extent.cuh: which keys a query sees, and where they are.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Rule {
    pub group_len: u32,
    pub window_len: u32,
    pub page_len: u32,
    pub sinks: u32,
    pub visible: u32,
}
// SAFETY: plain numbers, laid out as C does.
unsafe impl DeviceRepr for Rule {}

impl Rule {
    /// First position that the newest of `len` tokens sees plain: `PackedScheme::edge`, in numbers that kernels have too.
    pub(crate) fn edge(&self, len: usize) -> usize {
        let Some(position) = len.checked_sub(1).filter(|_| self.group_len > 0) else { return 0 };
        let (group_len, window_len) = (self.group_len as usize, self.window_len as usize);
        let by_window = len.saturating_sub(window_len) / group_len * group_len;
        let by_page = position.checked_div(self.page_len as usize).map_or(0, |page| page * self.page_len as usize);
        by_window.max(by_page)
    }
}

#[cfg(test)]
mod tests {
    use super::Rule;
    use crate::PackedScheme;

    #[test]
    fn the_edge_is_the_schemes() {
        for (group_len, window_len, page_len) in
            [(64, 0, 0), (64, 128, 512), (32, 17, 96), (128, 1, 128), (64, 5000, 0)]
        {
            let scheme = PackedScheme::new(4, 4, group_len, window_len, 4, page_len).unwrap();
            let [group_len, window_len, page_len] = [group_len, window_len, page_len].map(|n| n as u32);
            let rule = Rule { group_len, window_len, page_len, sinks: 4, visible: 0 };
            assert_eq!(rule.edge(0), 0);
            for position in 0..3000 {
                assert_eq!(rule.edge(position + 1), scheme.edge(position), "{scheme} {position}");
            }
        }
    }
}

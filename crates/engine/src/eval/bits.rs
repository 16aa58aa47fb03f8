//! Bits that a cache takes per element. In: schemes, or what an imitated codec says; out: bits of packed elements, and of
//! the whole cache at a length.
//!
//! Formula, for `len` tokens, with `edge = edge(len-1)` (kvant_kv::PackedScheme::edge): records hold the `edge` oldest
//! tokens, slots of sinks among them; sinks that lie before the edge are kept once more in f16; every token from the edge on
//! (window, and the tail that does not fill a group yet) is f16. So
//! `whole = (edge*bits + (min(sinks, edge) + len - edge) * 16) / len`, averaged over the layers. An imitated codec has no
//! slots for sinks: `edge - min(sinks, edge)` tokens are packed.
//! Tokens are counted, not what an allocator rounds up to; that is what `cache_bytes` of other commands says.
//! NOT here: bytes of a live cache (kvant-kv).

use super::Imitation;
use crate::Schemes;
use kvant_kv::Scheme;

/// Lengths that every contestant's whole cache is counted at, in tokens.
pub const LENGTHS: [usize; 3] = [2048, 8192, 32768];

/// Bits of an f16 element.
const PLAIN: f64 = 16.0;

/// What a cache takes.
#[derive(Debug, Clone)]
pub struct WholeBits {
    layers: Vec<(Scheme, f64)>,
    sink_slots: bool,
}

impl WholeBits {
    /// Of schemes as they are.
    pub fn of_schemes(schemes: &Schemes, head_dim: usize) -> Self {
        Self { layers: schemes.layers().iter().map(|s| (*s, s.bits_per_element(head_dim))).collect(), sink_slots: true }
    }

    /// Of another program's codec, with the window and sinks that it is given.
    pub fn of_imitation(imitation: &Imitation) -> Self {
        let scheme = imitation.kept.map_or(Scheme::F16, Scheme::Packed);
        Self { layers: vec![(scheme, imitation.bits)], sink_slots: false }
    }

    /// Bits of a packed element, scales and zeros included, averaged over layers (16 for plain ones).
    pub fn packed(&self) -> f64 {
        self.layers.iter().map(|(_, bits)| bits).sum::<f64>() / self.layers.len() as f64
    }

    /// Bits per element of the whole cache of a request with `len` tokens (1 or more).
    pub fn whole(&self, len: usize) -> f64 {
        let layer = |(scheme, bits): &(Scheme, f64)| {
            let Some(packed) = scheme.packed() else { return *bits };
            let edge = scheme.packed_len(len);
            let sinks = packed.sinks().min(edge);
            let slots = if self.sink_slots { edge } else { edge - sinks };
            (slots as f64 * bits + (sinks + len - edge) as f64 * PLAIN) / len as f64
        };
        self.layers.iter().map(layer).sum::<f64>() / self.layers.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(scheme: &str, len: usize) -> f64 {
        WholeBits::of_schemes(&crate::load_schemes(scheme, 2).unwrap(), 64).whole(len)
    }

    #[test]
    fn window_sinks_and_tail_count_as_f16() {
        assert_eq!((whole("f16", 5), whole("bf16", 5)), (16.0, 16.0));
        assert_eq!(whole("k4v4g64", 64), 4.5);
        // One token more fills no group: 64 packed, 1 plain.
        assert_eq!(whole("k4v4g64", 65), (64.0 * 4.5 + 16.0) / 65.0);
        assert_eq!(whole("k4v4g64w128s4p512", 100), 16.0);
        // edge(2047) = floor(1920/64)*64 = 1920: 1920 in records, 4 sinks and 128 newest in f16.
        assert_eq!(whole("k4v4g64w128s4p512", 2048), (1920.0 * 4.5 + 132.0 * 16.0) / 2048.0);
        // A page's edge packs what the window would keep: edge(2048) = 2048.
        assert_eq!(whole("k4v4g64w128s4p512", 2049), (2048.0 * 4.5 + 5.0 * 16.0) / 2049.0);
    }

    #[test]
    fn imitations_count_their_own_bits_and_no_slots_for_sinks() {
        let of = |name: &str| WholeBits::of_imitation(&Imitation::parse(name).unwrap().unwrap());
        assert_eq!((of("llama.cpp:q4_0").packed(), of("llama.cpp:q4_0").whole(2048)), (4.5, 4.5));
        assert_eq!(of("llama.cpp:q8_0+w128s4").packed(), 8.5);
        assert_eq!(of("llama.cpp:q8_0+w128s4").whole(2048), (1916.0 * 8.5 + 132.0 * 16.0) / 2048.0);
    }
}

//! Pages: sequences that start from shared ones get the bits they would get alone, nobody writes what others own, and
//! every block goes back.

use crate::numbers::{Request, Rig, bits, kernels_here};
use kvant_kv::{Arm, Error, LayerConfig, LayerShape, PageId};

const SCHEMES: [&[&str]; 7] = [
    &["k4v4g64w128s4p512"],
    &["k8v4g32w20s16p64"],
    &["k2v3g32"],
    &["ktq2vvq256x4g32w40s4p64"],
    &["f16"],
    &["bf16"],
    &["k4v4g64w128s4p128", "f16", "k2v2g32w40p64"],
];

fn shape() -> LayerShape {
    LayerShape::new(4, 2, 64).unwrap()
}

fn nothing_is_left(rig: &Rig) {
    assert_eq!(rig.cache.blocks(), (0, 0));
    assert_eq!(rig.cache.bytes(), kvant_kv::CacheBytes::default());
}

/// Prefills `pages` pages of a request, in steps that end at their ends, and holds each.
fn donate(rig: &mut Rig, donor: Request, pages: usize) -> Vec<PageId> {
    let len = rig.cache.share_len().unwrap();
    let held = rig.cache.len(0, donor.seq).unwrap() / len;
    (held..pages)
        .map(|number| {
            rig.step(&[(donor, len - 7)]);
            rig.step(&[(donor, 7)]);
            rig.cache.hold_page(donor.seq, number).unwrap()
        })
        .collect()
}

#[test]
fn a_sequence_from_pages_equals_one_that_computed_them() {
    for kernel in kernels_here() {
        for schemes in SCHEMES {
            let arms = if schemes == ["bf16"] { [Arm::Bf16; 2] } else { [Arm::Fused, Arm::DequantStep] };
            for arm in arms {
                let mut rig = Rig::layers(shape(), schemes, arm, kernel, 2);
                let len = rig.cache.share_len().unwrap();
                let donor = rig.add(1);
                let pages = donate(&mut rig, donor, 2);
                // The donor goes on with tokens of its own, alone and while others read its pages.
                rig.step(&[(donor, 5)]);
                for used in [1, 2] {
                    let solo = rig.add(1);
                    rig.step(&[(solo, used * len)]);
                    let seq = rig.cache.add_sequence_from(&pages[..used]).unwrap();
                    assert_eq!(rig.cache.len(0, seq).unwrap(), used * len);
                    let (mut solo, mut sharer) = (solo, Request { seq, stream: 1 });
                    (solo.stream, sharer.stream) = (7, 7);
                    for rows in [1, 40, 1, 1, 70, 1, 200, 1] {
                        let want = rig.step(&[(solo, rows)]).remove(0);
                        let got = rig.step(&[(donor, 1), (sharer, rows)]).remove(1);
                        assert_eq!(bits(&got), bits(&want), "{kernel} {schemes:?} {arm} pages {used}, {rows} rows");
                    }
                    rig.cache.remove_sequence(solo.seq).unwrap();
                    rig.cache.remove_sequence(sharer.seq).unwrap();
                }
                rig.cache.remove_sequence(donor.seq).unwrap();
                pages.iter().for_each(|page| rig.cache.release_page(*page).unwrap());
                nothing_is_left(&rig);
            }
        }
    }
}

/// Holding a page packs ahead of time; whoever owns the page gets the same bits as without.
#[test]
fn a_donor_is_not_changed_by_what_is_held_of_it() {
    for schemes in SCHEMES {
        let arm = if schemes == ["bf16"] { Arm::Bf16 } else { Arm::Fused };
        let mut rig = Rig::layers(shape(), schemes, arm, "portable", 2);
        let (plain, donor) = (rig.add(1), rig.add(1));
        let len = rig.cache.share_len().unwrap();
        let mut pages = Vec::new();
        for number in 0..2 {
            for rows in [len - 1, 1] {
                assert_eq!(bits(&rig.step(&[(plain, rows)])[0]), bits(&rig.step(&[(donor, rows)])[0]));
            }
            pages.push(rig.cache.hold_page(donor.seq, number).unwrap());
            // Back by one token and on with another: what is held stays, what the donor has is new.
            if rig.cache.trim(plain.seq, len * (number + 1) - 1).is_ok() {
                rig.cache.trim(donor.seq, len * (number + 1) - 1).unwrap();
                assert_eq!(bits(&rig.step(&[(plain, 1)])[0]), bits(&rig.step(&[(donor, 1)])[0]));
            }
        }
        for rows in [1, 3, len] {
            assert_eq!(bits(&rig.step(&[(plain, rows)])[0]), bits(&rig.step(&[(donor, rows)])[0]), "{schemes:?}");
        }
        rig.cache.remove_sequence(donor.seq).unwrap();
        rig.cache.remove_sequence(plain.seq).unwrap();
        pages.iter().for_each(|page| rig.cache.release_page(*page).unwrap());
        nothing_is_left(&rig);
    }
}

/// Plain rows and sinks that others own too are copied before they are written.
#[test]
fn nobody_writes_what_others_own() {
    for scheme in ["f16", "k4v4g32w64s4p64"] {
        let mut rig = Rig::layers(shape(), &[scheme], Arm::Fused, "portable", 1);
        let donor = rig.add(1);
        let pages = donate(&mut rig, donor, 1);
        let len = rig.cache.share_len().unwrap();
        let reader = Request { seq: rig.cache.add_sequence_from(&pages).unwrap(), stream: 1 };
        let solo = rig.add(1);
        rig.step(&[(solo, len)]);
        // f16: trimmed into the page. Packed: to 2 tokens, within the sinks; with this window nothing is packed for good yet.
        let back = if scheme == "f16" { len - 20 } else { 2 };
        rig.cache.trim(donor.seq, back).unwrap();
        rig.step(&[(Request { stream: 99, ..donor }, 30)]);
        assert_eq!(bits(&rig.step(&[(reader, 9)])[0]), bits(&rig.step(&[(solo, 9)])[0]), "{scheme}");
    }
}

#[test]
fn blocks_are_counted_once_and_go_with_their_last_owner() {
    let mut rig = Rig::new(shape(), "k4v4g64w128s4p512", "portable", 1);
    let donor = rig.add(1);
    let pages = donate(&mut rig, donor, 2);
    let alone = rig.cache.bytes();
    assert_eq!(rig.cache.pages(), 2);
    let sharers: Vec<_> = (0..5).map(|_| rig.cache.add_sequence_from(&pages).unwrap()).collect();
    assert_eq!(rig.cache.bytes().packed_bytes, alone.packed_bytes);
    // 16 records and one block of sinks, which have several owners.
    assert_eq!(rig.cache.blocks().1, 17);
    assert_eq!(rig.cache.bytes_held_by(&[donor.seq], &pages), alone.packed_bytes + alone.window_bytes);
    assert_eq!(rig.cache.bytes_held_by(&sharers, &pages), rig.cache.bytes_held_by(&sharers[..1], &[]));
    rig.cache.remove_sequence(donor.seq).unwrap();
    sharers.iter().for_each(|seq| rig.cache.remove_sequence(*seq).unwrap());
    let bytes: usize = pages.iter().map(|page| rig.cache.page_bytes(*page).unwrap()).sum();
    let held = rig.cache.bytes();
    assert_eq!(bytes, held.packed_bytes + held.window_bytes);
    rig.cache.release_page(pages[1]).unwrap();
    let again = rig.cache.add_sequence_from(&pages[..1]).unwrap();
    rig.cache.release_page(pages[0]).unwrap();
    assert_eq!(rig.cache.len(0, again).unwrap(), 512);
    rig.cache.remove_sequence(again).unwrap();
    nothing_is_left(&rig);
}

#[test]
fn layers_that_see_a_few_tokens_free_the_rest_and_share_what_is_seen() {
    for scheme in ["k4v4g64w128s4p512", "k8v8g32w64p64", "f16"] {
        let layers = [None, Some(100), Some(700)];
        let config = |visible| LayerConfig { shape: shape(), scheme: scheme.parse().unwrap(), visible };
        let mut rig = Rig::layers(shape(), &[scheme], Arm::Fused, "portable", 1);
        rig.cache = kvant_kv::Cache::new(&layers.map(config), Arm::Fused).unwrap();
        let (donor, solo) = (rig.add(1), rig.add(1));
        let len = rig.cache.share_len().unwrap();
        let n = 2048 / len;
        let pages = donate(&mut rig, donor, n);
        rig.step(&[(solo, n * len)]);
        rig.step(&[(solo, 1)]);
        // Of layer 0 everything is held; of the others what a query sees, and what is not packed yet: of 2,048 tokens less
        // than half.
        let bytes = rig.cache.sequence_bytes(solo.seq).unwrap();
        let all = kvant_kv::Cache::new(&[config(None); 3], Arm::Fused).unwrap().bytes_at(n * len + 1);
        assert_eq!(bytes, rig.cache.bytes_at(n * len + 1));
        assert!(bytes < all * 7 / 10, "{scheme}: {bytes} of {all}");
        let usable = rig.cache.usable_pages(&pages).unwrap();
        assert_eq!(usable, n, "{scheme}");
        let seq = rig.cache.add_sequence_from(&pages).unwrap();
        let sharer = Request { seq, stream: 1 };
        rig.step(&[(sharer, 1)]);
        for rows in [1, 30, 1, 200] {
            assert_eq!(bits(&rig.step(&[(solo, rows)])[0]), bits(&rig.step(&[(sharer, rows)])[0]), "{scheme}");
        }
        for seq in [donor.seq, solo.seq, seq] {
            rig.cache.remove_sequence(seq).unwrap();
        }
        pages.iter().for_each(|page| rig.cache.release_page(*page).unwrap());
        nothing_is_left(&rig);
    }
}

#[test]
fn what_cannot_be_shared_is_an_error() {
    let mut rig = Rig::new(shape(), "k4v4g64w128", "portable", 1);
    let seq = rig.add(1);
    rig.step(&[(seq, 1000)]);
    assert_eq!(rig.cache.share_len(), None, "a window and no pages");
    assert!(matches!(rig.cache.hold_page(seq.seq, 0), Err(Error::Shape { .. })));
    assert_eq!(Rig::layers(shape(), &["k4v4g64p64"], Arm::DequantOnce, "portable", 1).cache.share_len(), None);

    let mut rig = Rig::new(shape(), "k4v4g64w128p128", "portable", 1);
    let donor = rig.add(1);
    rig.step(&[(donor, 127)]);
    assert!(matches!(rig.cache.hold_page(donor.seq, 0), Err(Error::Shape { expected: 128, got: 127, .. })));
    rig.step(&[(donor, 1)]);
    let page = rig.cache.hold_page(donor.seq, 0).unwrap();
    assert!(matches!(rig.cache.hold_page(donor.seq, 1), Err(Error::Shape { .. })));
    assert!(matches!(rig.cache.add_sequence_from(&[page, page]), Err(Error::Shape { .. })));
    rig.cache.release_page(page).unwrap();
    assert!(matches!(rig.cache.release_page(page), Err(Error::NoSuchPage { .. })));
    assert!(matches!(rig.cache.add_sequence_from(&[page]), Err(Error::NoSuchPage { .. })));
    let units = [("k4v4g64", 512), ("f16", 512), ("k4v4g64w128p64", 64), ("k4v4g128w1p384", 384)];
    for (scheme, len) in units {
        assert_eq!(Rig::new(shape(), scheme, "portable", 1).cache.share_len(), Some(len), "{scheme}");
    }
    assert_eq!(
        Rig::layers(shape(), &["k4v4g64p128", "k4v4g32p96"], Arm::Fused, "portable", 1).cache.share_len(),
        Some(384)
    );
}

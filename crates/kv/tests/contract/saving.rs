//! Saved sequences: the same bits and bytes come back, and damaged ones are errors that change nothing.

use crate::numbers::{Request, Rig, bits};
use kvant_kv::{Arm, Error, LayerShape, SeqId};

const SCHEMES: [&[&str]; 6] = [
    &["k4v4g64w128s4p512"],
    &["k8v4g32w20s16p64"],
    &["k2v3g32"],
    &["f16"],
    &["ktq3vvq16x4g32w20s4p64"],
    &["k4v4g64w128s4p128", "f16"],
];

fn rig(schemes: &[&str]) -> Rig {
    Rig::layers(LayerShape::new(4, 2, 64).unwrap(), schemes, Arm::Fused, "portable", 1)
}

fn saved(rig: &Rig, seq: SeqId) -> Vec<u8> {
    let mut bytes = Vec::new();
    rig.cache.save_sequence(seq, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_restored_sequence_goes_on_as_if_it_had_never_left() {
    for schemes in SCHEMES {
        for len in [0, 1, 31, 130, 512, 700] {
            let mut here = rig(schemes);
            let stays = here.add(3);
            if len > 0 {
                here.step(&[(stays, len)]);
            }
            let bytes = saved(&here, stays.seq);
            let mut there = rig(schemes);
            let seq = there.cache.restore_sequence(&mut &bytes[..], &[]).unwrap();
            assert_eq!(saved(&there, seq), bytes, "{schemes:?} {len}");
            assert_eq!(there.cache.bytes(), here.cache.bytes());
            let back = Request { seq, stream: 3 };
            for rows in [1, 1, 70, 1, 600] {
                assert_eq!(bits(&there.step(&[(back, rows)])[0]), bits(&here.step(&[(stays, rows)])[0]));
            }
            there.cache.remove_sequence(seq).unwrap();
            assert_eq!(there.cache.blocks(), (0, 0));
        }
    }
}

#[test]
fn a_restored_sequence_shares_the_pages_of_its_prefix() {
    for schemes in [
        &["k4v4g64w128s4p512"][..],
        &["k4v4g32w40s2p64"],
        &["f16"],
        &["k4v4g64w128s4p128", "f16"],
        &["kvq256x4vtq2g32w40s2p64"],
    ] {
        let mut rig = rig(schemes);
        let len = rig.cache.share_len().unwrap();
        let (stays, donor) = (rig.add(3), rig.add(3));
        let mut pages = Vec::new();
        for number in 0..2 {
            rig.step(&[(donor, len)]);
            pages.push(rig.cache.hold_page(donor.seq, number).unwrap());
        }
        rig.cache.remove_sequence(donor.seq).unwrap();
        rig.step(&[(stays, 2 * len + 50)]);
        let bytes = saved(&rig, stays.seq);
        let before = (rig.cache.bytes(), rig.cache.blocks());
        for shared in [0, 1, 2] {
            let seq = rig.cache.restore_sequence(&mut &bytes[..], &pages[..shared]).unwrap();
            assert_eq!(saved(&rig, seq), bytes);
            assert_eq!(rig.cache.blocks().1 > 0, shared > 0);
            rig.cache.remove_sequence(seq).unwrap();
            assert_eq!((rig.cache.bytes(), rig.cache.blocks()), before);
        }
        let seq = rig.cache.restore_sequence(&mut &bytes[..], &pages).unwrap();
        let back = Request { seq, stream: 3 };
        for rows in [1, 70] {
            assert_eq!(bits(&rig.step(&[(back, rows)])[0]), bits(&rig.step(&[(stays, rows)])[0]), "{schemes:?}");
        }
    }
}

#[test]
fn damaged_bytes_are_an_error_and_leave_nothing_behind() {
    let mut here = rig(&["k4v4g32w20s2p64", "f16"]);
    let seq = here.add(3);
    here.step(&[(seq, 150)]);
    let bytes = saved(&here, seq.seq);
    let mut there = rig(&["k4v4g32w20s2p64", "f16"]);
    for end in (0..200).chain((200..bytes.len()).step_by(997)) {
        let e = there.cache.restore_sequence(&mut &bytes[..end], &[]).unwrap_err();
        assert!(matches!(e, Error::Saved { .. }), "{end}: {e}");
        assert!(there.cache.is_empty() && there.cache.blocks() == (0, 0));
    }
    // Every bit of the first header: refused, or (bits of a number that other numbers allow too) a sequence that holds
    // itself together.
    for bit in 0..8 * 120 {
        let mut wrong = bytes.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        if let Ok(seq) = there.cache.restore_sequence(&mut &wrong[..], &[]) {
            there.step(&[(Request { seq, stream: 3 }, 3)]);
            there.cache.remove_sequence(seq).unwrap();
        }
        assert!(there.cache.is_empty() && there.cache.blocks() == (0, 0));
    }
    let mut other = rig(&["k4v4g32w20s4p64", "f16"]);
    let e = other.cache.restore_sequence(&mut &bytes[..], &[]).unwrap_err().to_string();
    assert!(e.contains("k4v4g32w20s2p64") && e.contains("k4v4g32w20s4p64"), "{e}");
    let mut fewer = rig(&["k4v4g32w20s2p64"]);
    assert!(fewer.cache.restore_sequence(&mut &bytes[..], &[]).is_err());
}

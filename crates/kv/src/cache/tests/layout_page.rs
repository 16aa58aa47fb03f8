//! The numbers of docs/layout.md, read from the page itself. In: its tables; out: agreement with every bit of records
//! and blocks made by the real code.

use crate::append::cpu::best;
use crate::append::record::write_record_from_codes;
use crate::append::rows::write_sink;
use crate::cache::layout::{BLOCK_LEN, PlainLayout, RecordLayout};
use crate::quant::affine::Affine;
use crate::{PackedScheme, RowFormat, Scheme};
use half::f16;

/// Rows of the page's table whose first header cell is `first` and which has `columns` columns.
fn table(first: &str, columns: usize) -> Vec<Vec<String>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/layout.md");
    let page = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let cells =
        |line: &str| -> Vec<String> { line.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect() };
    let lines: Vec<_> = page.lines().map(|l| if l.starts_with('|') { cells(l) } else { Vec::new() }).collect();
    let head = lines.iter().position(|l| l.len() == columns && l[0] == first);
    let head = head.unwrap_or_else(|| panic!("{path} has no table `{first}` of {columns} columns"));
    lines[head + 2..].iter().take_while(|l| !l.is_empty()).cloned().collect()
}

fn number(text: &str) -> usize {
    text.parse().unwrap_or_else(|_| panic!("`{text}` is no number"))
}

fn packed(text: &str) -> PackedScheme {
    *text.parse::<Scheme>().unwrap().packed().expect("a packed scheme")
}

#[test]
fn offsets_of_the_parts() {
    let rows = table("scheme", 7);
    assert_eq!(rows.len(), 6);
    for row in rows {
        let l = RecordLayout::new(number(&row[1]), &packed(&row[0]));
        let address = |bytes: &[f16], record: &[u8]| bytes.as_ptr() as usize - record.as_ptr() as usize;
        let words = vec![0u64; l.record_bytes / 8];
        let record: &[u8] = bytemuck::cast_slice(&words);
        let got = [
            address(l.k_params(record).0, record),
            l.k_panels().next().unwrap().bytes.start,
            address(l.v_params(record, 0).0, record),
            l.v_panels().next().unwrap().bytes.start,
            l.record_bytes,
        ];
        assert_eq!(got.to_vec(), row[2..].iter().map(|c| number(c)).collect::<Vec<_>>(), "{row:?}");
    }
}

#[test]
fn bits_of_single_codes() {
    let rows = table("scheme", 5);
    assert_eq!(rows.len(), 11);
    for row in rows {
        let (scheme, head_dim) = row[0].split_once(", head_dim ").unwrap_or((&row[0], "64"));
        let (scheme, d) = (packed(scheme), number(head_dim));
        let l = RecordLayout::new(d, &scheme);
        let (token, channel, key) = (number(&row[2]), number(&row[3]), row[1] == "K");
        let bits = if key { l.k_bits_of(channel) } else { l.v_bits };
        let places: Vec<_> = row[4].split(' ').map(|p| p.split_once('.').expect("byte.bit")).collect();
        assert_eq!(places.len(), bits as usize, "{row:?}");
        for (bit, (byte, bit_in_byte)) in places.into_iter().enumerate() {
            let mut codes = [vec![0u8; l.group_len * d], vec![0u8; l.group_len * d]];
            codes[usize::from(!key)][token * d + channel] = 1 << bit;
            let mut words = vec![0u64; l.record_bytes / 8];
            let record: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
            write_record_from_codes(&l, &codes[0], &codes[1], |_| Affine::default(), |_, _| Affine::default(), record);
            let mut want = vec![0u8; l.record_bytes];
            want[number(byte)] = 1 << number(bit_in_byte);
            assert!(*record == want, "{row:?}, bit {bit} of the code");
        }
    }
}

#[test]
fn bytes_of_plain_rows() {
    let rows = table("block", 8);
    assert_eq!(rows.len(), 4);
    for row in rows {
        let [head, token, channel, d, sinks, at] = [2, 3, 4, 5, 6, 7].map(|i| number(&row[i]));
        let window = row[0] == "window";
        let tokens = if window { BLOCK_LEN } else { sinks };
        // A bf16 cache has no window and no sinks, but blocks of the same places.
        let formats =
            [(RowFormat::F16, f16::from_bits(0x1234).to_f32()), (RowFormat::Bf16, f32::from_bits(0x1234 << 16))];
        for (format, number) in formats.into_iter().take(if window { 2 } else { 1 }) {
            let layout = PlainLayout { head_dim: d, tokens, format };
            let mut words = vec![0u64; layout.block_bytes(2) / 8];
            let block: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
            let (mut k, mut v) = (vec![0.0; 2 * d], vec![0.0; 2 * d]);
            let x = if row[1] == "K" { &mut k } else { &mut v };
            x[head * d + channel] = number;
            if window {
                (best().write_rows)(&layout, block, token, 2 * d, &k, &v);
            } else {
                write_sink(&layout, block, token, &k, &v);
            }
            let mut want = vec![0u8; block.len()];
            want[at..at + 2].copy_from_slice(&[0x34, 0x12]);
            assert!(*block == want, "{row:?} {format}");
        }
    }
}

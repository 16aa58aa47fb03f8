//! Golden cases of the codecs that are not affine: tests/golden/codecs.py, written from the papers, wrote rows, codes and
//! attention in f64; every kernel of append and of attention that runs here must agree. In: codecs.safetensors, or another file
//! of the same keys that `KVANT_GOLDEN_CODECS` names; out: a failure that names codec, tensor and place.
//! NOT here: groups with scale and zero (golden.rs), our own parts beside each other (append/parity.rs, attend/parity.rs).

use super::{Golden, decode, each_kernel, read_file, token_rows};
use crate::append::cpu::{VARIANTS, Variant};
use crate::append::parity::CODECS;
use crate::append::record::read_record;
use crate::attend::reference::relative_error;
use crate::cache::layout::{BLOCK_LEN, Half, RecordLayout};
use crate::quant::grid::{BEST_STEP, Grid, STEPS};
use crate::quant::pack::{sub_codes, unpack_panel};
use crate::{Arm, Cache, Codebook, Codec, LayerConfig, LayerShape, Rows, Scheme};
use half::f16;
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};

/// Schemes whose attention the file has, with the head_dim of their rows.
const CASES: [(&str, usize); 20] = [
    ("ktq1vtq1g32w32s4", 64),
    ("ktq2vtq2g64", 128),
    ("ktq3vtq2g32w32s4", 80),
    ("ktq4vtq3g32w32", 64),
    ("krvq11vrvq11g32w32s4", 128),
    ("krvq21vrvq22g32w16", 80),
    ("krvq22vrvq21g64w32s4", 64),
    ("ksb1v4g32w32s4", 64),
    ("ksb1v4g64s16", 80),
    ("ksb2vtq4g32w32s4", 128),
    ("ksb3vsb1g32", 80),
    ("ksb4vsb3g32w32s4", 64),
    ("ksb1vsb4g32w32s4", 64),
    ("kvq16x4vvq16x8g32w32s4", 64),
    ("kvq16x8vvq16x4g32w32", 80),
    ("kvq256x4vvq256x8g32w32s4", 80),
    ("kvq256x8vvq256x4g64s4", 80),
    ("k4vtq4g32w32s4", 64),
    ("kvq256x4v4g32w32s4p64", 80),
    ("k2vsb2g32w32s4", 128),
];
/// How near a border, in steps or scales, an exact quotient may be for either code to be right.
const NEAR: f64 = 1e-4;
/// Codes of the whole file that may be so.
const MOST_NEAR: usize = 8;

fn codec_bytes() -> Vec<u8> {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/codecs.safetensors");
    read_file(std::env::var_os("KVANT_GOLDEN_CODECS").unwrap_or_else(|| committed.into()).as_ref())
}

/// The head_dim of the rows that the file shows a codec.
fn shown_dim(golden: &Golden<'_>, codec: &str) -> usize {
    golden.i64(&format!("codec.{codec}.head_dim"))[0]
}

/// Codebooks of keys (`k`) or values (`v`): one per kv head, or one for all.
fn books(golden: &Golden<'_>, d: usize, codec: Codec, tensor: &str) -> Vec<Codebook> {
    let Codec::Vector { centroids, sub_len } = codec else { return Vec::new() };
    let name = format!("book.d{d}.{codec}.{tensor}.");
    let numbers = |key: &str| golden.get::<f32>(&format!("{name}{key}"), Dtype::F32).1;
    let (base, step, levels) = (numbers("base"), numbers("step"), golden.u8(&format!("{name}levels")));
    let levels = levels.chunks_exact(d * centroids);
    let parts = base.chunks_exact(d).zip(step.chunks_exact(d)).zip(levels);
    let book = |((base, step), levels): ((&[f32], &[f32]), &[u8])| {
        Codebook::from_parts(centroids, sub_len, base.to_vec(), step.to_vec(), levels.to_vec()).unwrap()
    };
    parts.map(book).collect()
}

/// Half a record as what the file has: scale of each token, codes `[tokens][..]`, numbers `[tokens][D]`.
struct Coded {
    scales: Vec<f16>,
    codes: Vec<u8>,
    hat: Vec<f32>,
}

/// Rows of keys and of values `[32][D]`, written by a kernel of append and read again.
fn coded(layout: &RecordLayout, k: &[f16], v: &[f16], variant: &Variant) -> [Coded; 2] {
    let (d, g) = (layout.head_dim, layout.group_len);
    assert_eq!((g, k.len(), v.len()), (BLOCK_LEN, g * d, g * d));
    let across: Vec<f16> = (0..g * d).map(|i| k[i % g * d + i / g]).collect();
    let mut record = vec![0xAA; layout.record_bytes];
    (variant.write_record)(layout, 0, &[(&across, v)], 0, &mut record);
    let (k_hat, v_hat) = read_record(layout, 0, &record);
    let turned = |rows: usize, x: &[u8]| -> Vec<u8> { (0..x.len()).map(|i| x[i % rows * g + i / rows]).collect() };
    let subs = |book: &Codebook, bytes| {
        let code = sub_codes(bytes, book.centroids(), g);
        (0..g * book.subs()).map(|i| code(i % book.subs(), i / book.subs())).collect()
    };
    let mut codes = vec![0; g * d];
    let keys = match &layout.k {
        Half::Vectors(books) => {
            Coded { scales: vec![], codes: subs(&books[0], &record[layout.k_codes()]), hat: vec![] }
        }
        _ => {
            for p in layout.k_panels() {
                unpack_panel(layout.k_bits, p.lanes, d, &record[p.bytes], &mut codes[p.first_lane..], g);
            }
            Coded { scales: layout.k_scales(&record).to_vec(), codes: turned(d, &codes), hat: vec![] }
        }
    };
    let values = match &layout.v {
        Half::Vectors(books) => {
            Coded { scales: vec![], codes: subs(&books[0], &record[layout.all_v_codes()]), hat: vec![] }
        }
        _ => {
            for p in layout.v_panels() {
                unpack_panel(layout.v_bits, p.lanes, g, &record[p.bytes], &mut codes[p.first_lane..], d);
            }
            Coded { scales: layout.v_scales(&record).to_vec(), codes, hat: vec![] }
        }
    };
    let k_hat = (0..g * d).map(|i| k_hat[i % d * g + i / d]).collect();
    [Coded { hat: k_hat, ..keys }, Coded { hat: v_hat, ..values }]
}

/// Whether the number x of a row is so near the border above code `lower` that either code is right.
fn near_border(grid: &Grid, rms: f64, scale: f64, x: f64, lower: u8) -> bool {
    if !grid.is_signs() {
        let border = f64::from(grid.borders[lower as usize]);
        return (x / scale - border).abs() <= NEAR * border.abs().max(1.0);
    }
    let border = f64::from(lower) + 1.0 - f64::from(grid.middle) - 0.5;
    let near = |step: f64| (x / (rms * step) - border).abs() <= NEAR * border.abs().max(1.0);
    let best = f64::from(BEST_STEP[grid.bits as usize]);
    if grid.bits == 1 { near(1.0) } else { STEPS.iter().any(|&part| near(best * f64::from(part))) }
}

/// Leaves with what is wrong: a test of damage looks for it, and a panic would be printed there.
macro_rules! ensure {
    ($right:expr, $($words:tt)*) => {
        // NaN is not right either.
        let right: bool = $right;
        if !right { return Err(format!($($words)*)); }
    };
}

/// The file's rows of a codec, by one kernel of append: how many codes differ where either is right,
/// or what is wrong.
fn check_rows(golden: &Golden<'_>, name: &str, variant: &Variant) -> Result<usize, String> {
    let d = shown_dim(golden, name);
    let scheme: Scheme = format!("k{name}v{name}g32").parse().unwrap();
    let codec = scheme.packed().unwrap().k();
    let mut layout = RecordLayout::new(d, scheme.packed().unwrap());
    let vectors = codec.wants_codebooks();
    let of = |tensor| books(golden, d, codec, tensor);
    if vectors {
        (layout.k, layout.v) = (Half::Vectors(of("k").into()), Half::Vectors(of("v").into()));
    }
    let rows = ["k", "v"].map(|x| golden.f16(&format!("rows.d{d}.{x}")).1);
    let mut near = 0;
    for ((tensor, x), got) in ["k", "v"].into_iter().zip(&rows).zip(coded(&layout, &rows[0], &rows[1], variant)) {
        let at = format!("codec.{name}.{tensor}.");
        let case = format!("{}: {at}", variant.name);
        let want = golden.find::<u8>(&format!("{at}codes"), Dtype::U8)?.1;
        let (shape, hat) = golden.find::<f32>(&format!("{at}hat"), Dtype::F32)?;
        ensure!(shape[0] > 0 && shape[1] == d, "{case}hat has rows of {d}");
        ensure!(want.len() == got.codes.len(), "{case}codes: {} of them, want {}", got.codes.len(), want.len());
        let scales = if vectors { vec![] } else { golden.find::<f16>(&format!("{at}scale"), Dtype::F16)?.1 };
        ensure!(scales.len() == got.scales.len(), "{case}scale: {} of them, want {}", got.scales.len(), scales.len());
        for (token, (a, b)) in got.scales.iter().zip(&scales).enumerate() {
            ensure!(a.to_bits().abs_diff(b.to_bits()) <= 1, "{case}scale {token}: got {a}, want {b}");
        }
        let own = of(tensor);
        let per_row = want.len() / layout.group_len;
        let row = |token: usize| -> Vec<f64> { x[token * d..][..d].iter().map(|x| x.to_f64()).collect() };
        for (i, (&a, &b)) in got.codes.iter().zip(&want).enumerate().filter(|(_, (a, b))| a != b) {
            let (token, place) = (i / per_row, i % per_row);
            let x = row(token);
            let right = match &layout.k {
                Half::Groups => unreachable!("no codec here is"),
                Half::Grid(grid) => {
                    let rms = (x.iter().map(|x| x * x).sum::<f64>() / d as f64).sqrt();
                    a.abs_diff(b) == 1 && near_border(grid, rms, got.scales[token].to_f64(), x[place], a.min(b))
                }
                Half::Vectors(_) => {
                    let (book, n) = (&own[0], own[0].sub_len());
                    let x = &x[place * n..][..n];
                    let far = |code: u8| -> f64 {
                        let m = &book.values_of(place).0[code as usize * n..][..n];
                        x.iter().zip(m).map(|(x, m)| (x - f64::from(*m)).powi(2)).sum()
                    };
                    (far(a) - far(b)).abs() <= far(b) * NEAR + 1e-6 * x.iter().map(|x| x * x).sum::<f64>()
                }
            };
            ensure!(right, "{case}codes token {token} place {place}: got {a}, want {b}");
            near += 1;
        }
        for (i, (&a, &b)) in got.hat.iter().zip(&hat).enumerate() {
            let (token, channel) = (i / d, i % d);
            let place = token * per_row + channel * per_row / d;
            if got.codes[place] != want[place] {
                continue;
            }
            let tolerance = match vectors {
                true => 2e-6 * (b.abs() + own[0].base()[channel].abs()),
                false if got.scales[token] == scales[token] => 2e-6 * b.abs(),
                // One step of an f16.
                false => 1.1e-3 * b.abs(),
            };
            ensure!((a - b).abs() <= tolerance, "{case}hat token {token} channel {channel}: got {a}, want {b}");
        }
    }
    Ok(near)
}

/// The scalar codebooks of levels.rs are those that another method finds.
#[test]
fn golden_codecs_tables() {
    let bytes = codec_bytes();
    let golden = Golden::read(&bytes);
    let mut seen = 0;
    for name in CODECS.iter().filter(|name| name.starts_with("tq") || name.starts_with("rvq")) {
        let scheme: Scheme = format!("k{name}v{name}g32").parse().unwrap();
        let grid = Grid::of(scheme.packed().unwrap().k()).unwrap();
        let levels = golden.u8(&format!("table.{name}.levels"));
        let unit = golden.f64(&format!("table.{name}.unit"))[0];
        let got: Vec<u8> = (0..grid.codes()).map(|code| grid.level(code as u8)).collect();
        assert_eq!(got, levels, "{name}");
        assert!((f64::from(grid.unit) / unit - 1.0).abs() <= 1e-6, "{name}: unit {}, want {unit}", grid.unit);
        seen += 1;
    }
    assert_eq!(seen, 7);
}

/// The row that docs/codecs.md codes by hand, four times over: sums are of 16 channels at once.
#[test]
fn golden_codecs_page_example() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/codecs.md");
    let page = String::from_utf8(read_file(path.as_ref())).unwrap();
    let lines = page.lines().skip_while(|line| !line.starts_with("| x | x / scale | tq2 code |"));
    let number = |cell: &str| cell.trim().parse::<f32>().unwrap_or_else(|_| panic!("`{cell}` is no number"));
    let rows: Vec<Vec<f32>> = lines
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(number).collect())
        .collect();
    assert_eq!(rows.len(), 4);
    let x: Vec<f32> = rows.iter().map(|row| row[0]).collect::<Vec<_>>().repeat(4);
    let grid = Grid::of(Codec::Turbo { bits: 2 }).unwrap();
    let mut codes = vec![0; x.len()];
    let scale = grid.quantize(&x, &mut codes);
    for (row, (&code, x)) in rows.iter().zip(codes.iter().zip(&x)) {
        let level = f32::from(grid.level(code)) - grid.middle;
        let got = [x / scale.to_f32(), f32::from(code), level, grid.dequantize(scale, code)];
        assert!(got.iter().zip(&row[1..]).all(|(a, b)| (a - b).abs() < 6e-6), "{row:?}: got {got:?}");
    }
}

#[test]
fn golden_codecs_rows() {
    let bytes = codec_bytes();
    let golden = Golden::read(&bytes);
    for variant in VARIANTS {
        if let Err(why) = (variant.available)() {
            println!("skipped {}: {why}", variant.name);
            continue;
        }
        let near: usize =
            CODECS.iter().map(|name| check_rows(&golden, name, variant).unwrap_or_else(|why| panic!("{why}"))).sum();
        println!("{}: {near} codes differ next to a border", variant.name);
        assert!(near <= MOST_NEAR, "{}: {near} codes differ next to a border", variant.name);
    }
}

/// The file's bytes with one tensor left out (None) or with its bytes changed.
fn changed(bytes: &[u8], name: &str, change: Option<fn(&mut [u8])>) -> Vec<u8> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let mut data = file.tensor(name).unwrap().data().to_vec();
    change.unwrap_or(|_| {})(&mut data);
    let views = file.iter().filter(|(key, _)| change.is_some() || *key != name).map(|(key, view)| {
        let data = if key == name { &data[..] } else { view.data() };
        (key, TensorView::new(view.dtype(), view.shape().to_vec(), data).unwrap())
    });
    serialize(views, None).unwrap()
}

/// What is missing or wrong in the file is noticed, for every codec.
#[test]
fn golden_codecs_notice_damage() {
    let bytes = codec_bytes();
    let passes =
        |bytes: &[u8], name: &str| check_rows(&Golden::read(bytes), name, &VARIANTS[VARIANTS.len() - 1]).is_ok();
    for name in CODECS {
        assert!(passes(&bytes, name), "{name} as it is");
        let mut entries = vec!["codes", "hat"];
        if !name.starts_with("vq") {
            entries.push("scale");
        }
        for entry in entries {
            // One code of the first row; the upper byte of its first number or scale.
            let change: fn(&mut [u8]) = match entry {
                "codes" => |data| data[0] ^= 1,
                "hat" => |data| data[2] ^= 4,
                _ => |data| data[0] ^= 4,
            };
            for tensor in ["k", "v"] {
                let key = format!("codec.{name}.{tensor}.{entry}");
                for change in [None, Some(change)] {
                    assert!(!passes(&changed(&bytes, &key, change), name), "{key}: {}", change.is_some());
                }
            }
        }
    }
}

/// Decoded token by token through a cache, on every kernel and every arm.
#[test]
fn golden_codecs_attention() {
    let bytes = codec_bytes();
    let golden = Golden::read(&bytes);
    for (text, d) in CASES {
        let scheme: Scheme = text.parse().unwrap();
        let packed = scheme.packed().unwrap();
        let (ks, k) = golden.f32_of_f16(&format!("data.d{d}.k"));
        let (_, v) = golden.f32_of_f16(&format!("data.d{d}.v"));
        let (qs, q) = golden.f32_of_f16(&format!("data.d{d}.q"));
        let want = golden.f64(&format!("attend.{text}.d{d}.out"));
        let (heads, tokens, steps) = (ks[0], ks[1], qs[0]);
        let (k, v) = (token_rows(&k, heads, tokens, d), token_rows(&v, heads, tokens, d));
        let shape = LayerShape::new(qs[1], heads, d).unwrap();
        let (row, n, prompt) = (heads * d, qs[1] * d, tokens - steps);
        assert_eq!(want.len(), q.len(), "{text}");
        each_kernel(|kernel, mut attention, tolerance, _| {
            let mut worst: f64 = 0.0;
            for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep] {
                let mut cache = Cache::new(&[LayerConfig { shape, scheme, visible: None }], arm).unwrap();
                let keys = books(&golden, d, packed.k(), "k");
                cache.set_codebooks(0, keys, books(&golden, d, packed.v(), "v")).unwrap();
                let seq = cache.add_sequence();
                let all = [Rows { seq, rows: prompt }];
                cache.append(0, &all, &k[..prompt * row], &v[..prompt * row]).unwrap();
                cache.commit(0, &all).unwrap();
                for step in 0..steps {
                    let at = (prompt + step) * row..(prompt + step + 1) * row;
                    let q = &q[step * n..][..n];
                    let out = decode(&mut cache, &mut attention, seq, d, (&k[at.clone()], &v[at], q));
                    // dequant arms round x_hat to f16: 2^-11 relative.
                    let tolerance = if arm == Arm::Fused { tolerance } else { 3e-3 };
                    let err = relative_error(&out, &want[step * n..][..n]);
                    assert!(err <= tolerance, "{text} {kernel} {arm} step {step}: {err:.1e} > {tolerance:.0e}");
                    if arm == Arm::Fused {
                        worst = worst.max(err);
                    }
                }
            }
            let packed = attention.routes().get(&format!("{kernel}:packed")).copied();
            assert_eq!(packed, Some(steps as u64), "{text} {kernel} read records");
            println!("{text} d{d} {kernel}: {worst:.1e}");
        });
    }
}

/// Every codec is in a case of keys and in one of values.
#[test]
fn golden_codecs_attention_has_every_codec() {
    let schemes: Vec<Scheme> = CASES.iter().map(|(text, _)| text.parse().unwrap()).collect();
    for name in CODECS {
        let keys = schemes.iter().filter(|s| s.packed().unwrap().k().to_string() == name).count();
        let values = schemes.iter().filter(|s| s.packed().unwrap().v().to_string() == name).count();
        assert!(keys > 0, "no case has {name} keys");
        assert!(values > 0, "no case has {name} values");
    }
}

#[test]
#[should_panic(expected = "golden tensor codec.tq2.head_dim")]
fn golden_codecs_that_are_missing_fail() {
    let bytes = codec_bytes();
    let without = changed(&bytes, "codec.tq2.head_dim", None);
    let _ = check_rows(&Golden::read(&without), "tq2", &VARIANTS[VARIANTS.len() - 1]);
}

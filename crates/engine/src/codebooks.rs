//! Codebooks of a model's sub-vectors, and the file they lie in. In: a safetensors file and the schemes that it is for, or
//! codebooks; out: codebooks by layer, or the file's bytes. The file is not trusted.
//!
//! Tensors of layer 3: `layer.3.k.base` and `.k.step` f32 `[kv_heads, head_dim]`, `.k.levels` u8
//! `[kv_heads, head_dim / sub_len, centroids, sub_len]`, `.k.smooth` f32 `[kv_heads, head_dim]` (what key channels are divided
//! by, model/basis.rs); `.v.` likewise without `smooth`. A tensor that is stored otherwise has none; what no scheme asks for is
//! left.
//! NOT here: how centroids are found (kvant-kv; tune/centroids.rs), scheme files (schemes.rs).

use crate::Error;
use kvant_kv::{Codebook, Codec, LayerShape, PackedScheme, Scheme};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Bytes of such a file: far above those of any model, small enough that reading one cannot exhaust memory.
const MOST_BYTES: u64 = 1 << 30;

/// Codebooks of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerBooks {
    /// One per kv head; empty where keys are no sub-vectors.
    pub keys: Vec<Codebook>,
    /// One per kv head; empty where values are none.
    pub values: Vec<Codebook>,
    /// What key channels are divided by: `[kv_heads][head_dim]`; empty where keys are no sub-vectors.
    pub smooth: Vec<f32>,
}

impl LayerBooks {
    /// Whether these are for a layer of this scheme and shape; Err says what is not.
    pub(crate) fn check(&self, scheme: &PackedScheme, shape: &LayerShape) -> Result<(), String> {
        for (name, codec, books) in [("keys", scheme.k(), &self.keys), ("values", scheme.v(), &self.values)] {
            let Some((centroids, sub_len)) = sizes(codec) else { continue };
            if books.len() != shape.kv_heads {
                return Err(format!(
                    "there are codebooks of {name} for {} of {} kv heads",
                    books.len(),
                    shape.kv_heads
                ));
            }
            let size = |b: &Codebook| (b.head_dim(), b.centroids(), b.sub_len());
            if let Some(bad) = books.iter().find(|b| size(b) != (shape.head_dim, centroids, sub_len)) {
                let (d, n, len) = size(bad);
                return Err(format!(
                    "a codebook of {name} is {n}x{len} for {d} channels, and {centroids}x{sub_len} for {} is needed",
                    shape.head_dim
                ));
            }
        }
        if sizes(scheme.k()).is_some() && self.smooth.len() != shape.row_len() {
            return Err(format!(
                "{} channels of keys are smoothed, and there are {}",
                self.smooth.len(),
                shape.row_len()
            ));
        }
        if let Some(factor) = self.smooth.iter().find(|x| !is_factor(**x)) {
            return Err(format!("keys cannot be divided by {factor}"));
        }
        Ok(())
    }
}

/// Centroids and channels of a codec's sub-vectors, if it has any.
pub(crate) fn sizes(codec: Codec) -> Option<(usize, usize)> {
    match codec {
        Codec::Vector { centroids, sub_len } => Some((centroids, sub_len)),
        _ => None,
    }
}

fn is_factor(x: f32) -> bool {
    x.is_finite() && x > 0.0
}

/// Reads the codebooks that these schemes ask for, layer by layer.
///
/// # Errors
/// [`Error::Codebooks`] names the file and the tensor.
pub(crate) fn read(path: &Path, schemes: &[Scheme]) -> Result<Vec<Option<Arc<LayerBooks>>>, Error> {
    let no = |why: String| Error::Codebooks { path: path.into(), why };
    let bytes = bytes_of(path).map_err(no)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| no(format!("it is no safetensors file: {e}")))?;
    let of = |(layer, scheme): (usize, &Scheme)| {
        let Some(packed) = scheme.packed().filter(|p| sizes(p.k()).or(sizes(p.v())).is_some()) else { return Ok(None) };
        layer_of(&tensors, layer, packed).map(|books| Some(Arc::new(books)))
    };
    schemes.iter().enumerate().map(of).collect::<Result<_, String>>().map_err(no)
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, String> {
    // Opening a pipe would wait for a writer.
    let meta = std::fs::metadata(path).map_err(|e| e.to_string())?;
    if !meta.is_file() {
        return Err("it is not a regular file".into());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|e| e.to_string())?;
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if bytes.len() as u64 > MOST_BYTES { Err(format!("it has more than {MOST_BYTES} bytes")) } else { Ok(bytes) }
}

fn layer_of(tensors: &SafeTensors<'_>, layer: usize, scheme: &PackedScheme) -> Result<LayerBooks, String> {
    let mut books = LayerBooks::default();
    if let Some(sizes) = sizes(scheme.k()) {
        let prefix = format!("layer.{layer}.k");
        books.keys = half_of(tensors, &prefix, sizes)?;
        let shape = [books.keys.len(), books.keys[0].head_dim()];
        let name = format!("{prefix}.smooth");
        books.smooth = floats(tensors, &name, Some(shape))?.1;
        if let Some(factor) = books.smooth.iter().find(|x| !is_factor(**x)) {
            return Err(format!("tensor `{name}` has {factor}, and keys are divided by finite numbers above 0"));
        }
    }
    if let Some(sizes) = sizes(scheme.v()) {
        books.values = half_of(tensors, &format!("layer.{layer}.v"), sizes)?;
    }
    Ok(books)
}

/// Codebooks of one tensor of a layer, one per kv head (1 or more).
fn half_of(
    tensors: &SafeTensors<'_>,
    prefix: &str,
    (centroids, sub_len): (usize, usize),
) -> Result<Vec<Codebook>, String> {
    let ([heads, d], base) = floats(tensors, &format!("{prefix}.base"), None)?;
    let (_, step) = floats(tensors, &format!("{prefix}.step"), Some([heads, d]))?;
    let name = format!("{prefix}.levels");
    let levels = find(tensors, &name, Dtype::U8)?;
    if levels.shape() != [heads, d / sub_len, centroids, sub_len] || !d.is_multiple_of(sub_len) {
        return Err(format!(
            "tensor `{name}` has shape {:?}, expected {:?}",
            levels.shape(),
            [heads, d / sub_len, centroids, sub_len]
        ));
    }
    let parts = base.chunks_exact(d).zip(step.chunks_exact(d)).zip(levels.data().chunks_exact(d * centroids));
    parts
        .map(|((base, step), levels)| {
            Codebook::from_parts(centroids, sub_len, base.to_vec(), step.to_vec(), levels.to_vec())
                .map_err(|e| format!("tensors `{prefix}.base`, `.step` and `.levels`: {e}"))
        })
        .collect()
}

fn find<'a>(tensors: &SafeTensors<'a>, name: &str, dtype: Dtype) -> Result<TensorView<'a>, String> {
    let tensor = tensors.tensor(name).map_err(|_| format!("it has no tensor `{name}`"))?;
    match tensor.dtype() {
        found if found != dtype => Err(format!("tensor `{name}` is of type {found:?}, expected {dtype:?}")),
        _ => Ok(tensor),
    }
}

/// A tensor of finite f32 numbers with two dimensions, neither of them 0; which, if it is known.
fn floats(tensors: &SafeTensors<'_>, name: &str, shape: Option<[usize; 2]>) -> Result<([usize; 2], Vec<f32>), String> {
    let tensor = find(tensors, name, Dtype::F32)?;
    let &[rows, columns] = tensor.shape() else {
        return Err(format!("tensor `{name}` has shape {:?}, expected [kv_heads, head_dim]", tensor.shape()));
    };
    if let Some(expected) = shape.filter(|s| *s != [rows, columns]) {
        return Err(format!("tensor `{name}` has shape {:?}, expected {expected:?}", tensor.shape()));
    }
    if rows == 0 || columns == 0 {
        return Err(format!("tensor `{name}` has shape {:?}, and nothing is in it", tensor.shape()));
    }
    let values: Vec<f32> = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    match values.iter().find(|x| !x.is_finite()) {
        Some(x) => Err(format!("tensor `{name}` has {x}, which is no number to store by")),
        None => Ok(([rows, columns], values)),
    }
}

/// The file of these codebooks.
///
/// # Errors
/// None in practice; those of the format.
pub fn file_bytes(layers: &[Option<Arc<LayerBooks>>]) -> Result<Vec<u8>, Error> {
    let mut parts: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let le = |numbers: &mut dyn Iterator<Item = f32>| numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    for (layer, books) in layers.iter().enumerate().filter_map(|(i, b)| Some((i, b.as_ref()?))) {
        for (name, half) in [("k", &books.keys), ("v", &books.values)] {
            let Some(first) = half.first() else { continue };
            let (d, n, len) = (first.head_dim(), first.centroids(), first.sub_len());
            let mut put = |part: &str, dtype, shape, bytes| {
                parts.push((format!("layer.{layer}.{name}.{part}"), dtype, shape, bytes))
            };
            put("base", Dtype::F32, vec![half.len(), d], le(&mut half.iter().flat_map(|b| b.base()).copied()));
            put("step", Dtype::F32, vec![half.len(), d], le(&mut half.iter().flat_map(|b| b.step()).copied()));
            let levels = half.iter().flat_map(|b| b.levels()).copied().collect();
            put("levels", Dtype::U8, vec![half.len(), d / len, n, len], levels);
            if name == "k" {
                put("smooth", Dtype::F32, vec![half.len(), d], le(&mut books.smooth.iter().copied()));
            }
        }
    }
    let failed = |e: safetensors::SafeTensorError| Error::Tensor { why: e.to_string() };
    let views =
        parts.iter().map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    safetensors::serialize(views, None).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::View;
    use std::borrow::Cow;
    use std::collections::BTreeMap;

    fn book(seed: u64) -> Codebook {
        let rows: Vec<f32> = (0..64 * 64).map(|i| ((i as f32 + seed as f32) * 0.71).sin()).collect();
        Codebook::train(64, 16, 8, &rows, 3, seed).unwrap()
    }

    fn layers() -> Vec<Option<Arc<LayerBooks>>> {
        let smooth = (0..128).map(|i| 1.0 + i as f32).collect();
        let both = LayerBooks { keys: vec![book(1), book(2)], values: vec![book(3), book(4)], smooth };
        vec![
            None,
            Some(Arc::new(both)),
            Some(Arc::new(LayerBooks { values: vec![book(5), book(6)], ..LayerBooks::default() })),
        ]
    }

    fn schemes() -> Vec<Scheme> {
        ["ktq2v4g32", "kvq16x8vvq16x8g32", "k4vvq16x8g32"].iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), file_bytes(&layers()).unwrap()).unwrap();
        assert_eq!(read(file.path(), &schemes()).unwrap(), layers());
        let shape = LayerShape::new(4, 2, 64).unwrap();
        for (books, scheme) in layers().iter().zip(schemes()) {
            assert!(books.as_ref().is_none_or(|books| books.check(scheme.packed().unwrap(), &shape).is_ok()));
        }
        let books = layers()[1].clone().unwrap();
        let check = |scheme: &str, q, kv, d| {
            let scheme: Scheme = scheme.parse().unwrap();
            books.check(scheme.packed().unwrap(), &LayerShape::new(q, kv, d).unwrap()).unwrap_err()
        };
        assert!(check("kvq16x8vvq16x8g32", 4, 4, 64).contains("for 2 of 4 kv heads"));
        assert!(check("kvq16x8vvq16x8g32", 4, 2, 128).contains("for 64 channels"));
        assert!(check("k4vvq16x4g32", 4, 2, 64).contains("16x8"));
    }

    /// A tensor to be changed.
    #[derive(Clone)]
    struct Loose(Dtype, Vec<usize>, Vec<u8>);

    impl View for Loose {
        fn dtype(&self) -> Dtype {
            self.0
        }
        fn shape(&self) -> &[usize] {
            &self.1
        }
        fn data(&self) -> Cow<'_, [u8]> {
            Cow::Borrowed(&self.2)
        }
        fn data_len(&self) -> usize {
            self.2.len()
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_file_and_tensor() {
        let whole = file_bytes(&layers()).unwrap();
        let tensors = SafeTensors::deserialize(&whole).unwrap();
        let loose = |t: TensorView<'_>| Loose(t.dtype(), t.shape().to_vec(), t.data().to_vec());
        let whole: BTreeMap<String, Loose> = tensors.tensors().into_iter().map(|(name, t)| (name, loose(t))).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        let refused = |name: &str, change: &dyn Fn(&mut Loose), part: &str| {
            let mut changed = whole.clone();
            change(changed.get_mut(name).unwrap());
            if changed[name].1.is_empty() {
                changed.remove(name);
            }
            std::fs::write(file.path(), safetensors::serialize(changed, None).unwrap()).unwrap();
            let e = read(file.path(), &schemes()).unwrap_err().to_string();
            let tensor = name.rsplit_once('.').unwrap().0;
            assert!(e.contains(part) && e.contains(tensor) && e.contains(file.path().to_str().unwrap()), "{name}: {e}");
        };
        let number = |x: f32| move |t: &mut Loose| t.2[8..12].copy_from_slice(&x.to_le_bytes());
        let gone = |t: &mut Loose| *t = Loose(Dtype::U8, vec![], vec![0]);
        for name in ["layer.1.k.base", "layer.1.k.step", "layer.1.k.levels", "layer.1.k.smooth", "layer.2.v.levels"] {
            refused(name, &gone, "no tensor");
            refused(name, &|t| t.1.swap(0, 1), "has shape");
            refused(name, &|t| *t = Loose(Dtype::F16, vec![t.2.len() / 2], t.2.clone()), "type F16");
        }
        for name in ["layer.1.k.base", "layer.1.v.step", "layer.1.k.smooth"] {
            refused(name, &number(f32::NAN), "NaN");
            refused(name, &number(f32::INFINITY), "inf");
        }
        refused("layer.1.k.smooth", &number(0.0), "above 0");
        refused("layer.1.k.smooth", &number(-1.0), "above 0");
        refused("layer.1.k.base", &number(1e6), "f16");

        std::fs::write(file.path(), b"no tensors").unwrap();
        assert!(read(file.path(), &schemes()).unwrap_err().to_string().contains("no safetensors file"));
        assert!(matches!(read(Path::new("/nowhere.safetensors"), &schemes()), Err(Error::Codebooks { .. })));
        assert!(read(&std::env::temp_dir(), &schemes()).unwrap_err().to_string().contains("regular file"));
    }
}

//! Shapes and lists on the command line. In: text such as `b=1,q=32,kv=8,d=128,s=16384` or `f16,k4v4g64`; out: numbers
//! and schemes. NOT here: which shapes kernels take (kvant-kv).

use crate::failure::{Failure, SCHEME_HINT};
use kvant_engine::schemes::parse_layer;
use kvant_kv::{LayerShape, Scheme};
use std::collections::BTreeMap;

/// Largest number a part of a shape may have: products of two stay far inside 64 bits.
const MAX_PART: usize = 1 << 30;

/// Numbers of a text `name=number,...` that has exactly the names asked for, in any order.
///
/// # Errors
/// [`Failure`] that names the part at fault and shows `example`.
pub fn parts<const N: usize>(text: &str, names: [&str; N], example: &str) -> Result<[usize; N], Failure> {
    let no =
        |why: String| Failure::input(format!("bad shape `{text}`: {why}"), format!("a shape looks like {example}"));
    let mut found = BTreeMap::new();
    for part in text.split(',') {
        let (name, number) = part.split_once('=').ok_or_else(|| no(format!("`{part}` has no `=`")))?;
        let name = name.trim();
        if !names.contains(&name) {
            return Err(no(format!("`{name}` is no part of it")));
        }
        let n = match number.trim().parse::<usize>() {
            Ok(n) if (1..=MAX_PART).contains(&n) => n,
            _ => return Err(no(format!("`{name}` must be a number from 1 to {MAX_PART}"))),
        };
        if found.insert(name, n).is_some() {
            return Err(no(format!("`{name}` appears twice")));
        }
    }
    let mut numbers = [0; N];
    for (number, name) in numbers.iter_mut().zip(names) {
        *number = *found.get(name).ok_or_else(|| no(format!("`{name}` is missing")))?;
    }
    Ok(numbers)
}

/// A checked layer shape, with the failure of a command line.
pub fn layer_shape(q_heads: usize, kv_heads: usize, head_dim: usize) -> Result<LayerShape, Failure> {
    LayerShape::new(q_heads, kv_heads, head_dim)
        .map_err(|e| Failure::input(e, "head_dim is 64, 80, 96, 128 or 256, and q_heads is kv_heads times 1 to 16"))
}

/// Schemes and presets of a comma-separated list, each once, in their order. Rotations are left out: no operation of the
/// cache knows of them, a model turns its rows before.
pub fn schemes(text: &str) -> Result<Vec<Scheme>, Failure> {
    let mut schemes = Vec::new();
    for part in text.split(',') {
        let (scheme, _) = parse_layer(part.trim())?;
        if schemes.contains(&scheme) {
            return Err(Failure::input(format!("scheme {scheme} appears twice in `{text}`"), SCHEME_HINT));
        }
        schemes.push(scheme);
    }
    Ok(schemes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_need_each_part_once() {
        assert_eq!(parts("b=1,s=9", ["s", "b"], "x").unwrap(), [9, 1]);
        for (bad, why) in [
            ("b=1", "`s` is missing"),
            ("b=1,s=0", "`s` must be"),
            ("b=1,s=9999999999999", "`s` must be"),
            ("b=1,s", "no `=`"),
            ("b=1,s=1,b=2", "twice"),
            ("b=1,t=1", "`t` is no part"),
            ("", "no `=`"),
        ] {
            let e = parts(bad, ["s", "b"], "b=1,s=2").unwrap_err();
            assert!(e.what.contains(why), "{bad}: {}", e.what);
            assert!(e.hint.contains("b=1,s=2"));
        }
    }

    #[test]
    fn lists_of_schemes_are_checked() {
        assert_eq!(schemes("f16, k4v4g64").unwrap().len(), 2);
        assert!(schemes("f16,f16").unwrap_err().what.contains("twice"));
        assert!(schemes("f16,").is_err());
    }
}

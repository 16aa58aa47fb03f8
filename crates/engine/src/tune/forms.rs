//! What a layer may store its keys or values as. In: a template (everything but the bits); out: the scheme and basis of a
//! layer, and bits per element.
//! NOT here: which form a layer gets (allocate.rs).

use super::Sensitivity;
use crate::model::{Basis, Turn};
use kvant_kv::{PackedScheme, Scheme, SchemeError};
use std::fmt;

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tensor {
    /// Keys.
    K,
    /// Values.
    V,
}

/// One way to store one tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Form {
    /// Keys or values.
    pub tensor: Tensor,
    /// Bits of a code.
    pub bits: u32,
    /// One key channel in so many is loud; 0: none.
    pub loud: usize,
}

impl Form {
    const fn keys(bits: u32, loud: usize) -> Self {
        Self { tensor: Tensor::K, bits, loud }
    }

    const fn values(bits: u32) -> Self {
        Self { tensor: Tensor::V, bits, loud: 0 }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tensor, self.loud) {
            (Tensor::K, 0) => write!(f, "k{}", self.bits),
            (Tensor::K, loud) => write!(f, "k{}l{loud}", self.bits),
            (Tensor::V, _) => write!(f, "v{}", self.bits),
        }
    }
}

/// Every form, cheapest first of each tensor.
pub const FORMS: [Form; 9] = [
    Form::keys(2, 0),
    Form::keys(2, 8),
    Form::keys(2, 4),
    Form::keys(2, 2),
    Form::keys(3, 0),
    Form::keys(4, 0),
    Form::values(2),
    Form::values(3),
    Form::values(4),
];

/// The forms that the quick way measures; [`complete`] derives the others.
pub const QUICK_FORMS: [Form; 4] = [Form::keys(2, 0), Form::keys(2, 4), Form::values(2), Form::values(3)];

/// What one more bit per code divides a divergence by where nothing was measured: halved steps quarter a squared error.
const PER_BIT: f64 = 4.0;

/// Fills in forms that were not measured: shares of loud channels on the line between logarithms of those measured, more
/// bits from the nearest form with fewer.
pub fn complete(measured: &Sensitivity, layers: usize, head_dim: usize) -> Sensitivity {
    let mut all = measured.clone();
    for layer in 0..layers {
        for form in FORMS {
            if all.contains_key(&(layer, form)) {
                continue;
            }
            let known = |f: &Form| f.tensor == form.tensor && measured.contains_key(&(layer, *f));
            let bits = |f: &Form| f.code_bits(head_dim);
            // 0 would have no logarithm; a cost that is no number stays one.
            let positive = |x: f64| if x < f64::MIN_POSITIVE { f64::MIN_POSITIVE } else { x };
            let cost = |f: &Form| positive(measured[&(layer, *f)]).ln();
            let below =
                FORMS.iter().filter(|f| known(f) && bits(f) <= bits(&form)).max_by(|a, b| bits(a).total_cmp(&bits(b)));
            let above =
                FORMS.iter().filter(|f| known(f) && bits(f) > bits(&form)).min_by(|a, b| bits(a).total_cmp(&bits(b)));
            let guess = match (below, above) {
                (Some(a), Some(b)) => cost(a) + (cost(b) - cost(a)) * (bits(&form) - bits(a)) / (bits(b) - bits(a)),
                (Some(near), None) | (None, Some(near)) => cost(near) + (bits(near) - bits(&form)) * PER_BIT.ln(),
                (None, None) => continue,
            };
            all.insert((layer, form), guess.exp());
        }
    }
    all
}

impl Form {
    /// Bits of a code, those of loud channels averaged in.
    pub fn code_bits(&self, head_dim: usize) -> f64 {
        kvant_kv::scheme::code_bits(self.bits, self.loud, head_dim)
    }
}

/// Everything of a scheme but bits and loud channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Template {
    /// Its group_len, window, sinks, pages and fit.
    pub scheme: PackedScheme,
    /// Keys are rotated where no channel is loud and codes have 3 bits or more (2-bit keys lose by it).
    pub rotate_k: bool,
    /// Values are rotated.
    pub rotate_v: bool,
}

impl Template {
    /// A layer that stores its keys and values so. `ranked`: per kv head all channels, the loudest first.
    ///
    /// # Errors
    /// [`SchemeError`] for forms that are none.
    pub fn layer(&self, k: Form, v: Form, ranked: &[Vec<u16>]) -> Result<(Scheme, Basis), SchemeError> {
        let s = &self.scheme;
        let scheme = PackedScheme::new(k.bits, v.bits, s.group_len(), s.window_len(), s.sinks(), s.page_len())?
            .with_loud(k.loud)?;
        let scheme = scheme.with_fit(s.fit());
        let turn = |on: bool| if on { Turn::Plain } else { Turn::None };
        let keys = turn(self.rotate_k && k.loud == 0 && k.bits > 2);
        let mut key_order = None;
        if k.loud > 0 {
            let first = |ranked: &Vec<u16>| {
                let mut loud = ranked[..scheme.loud_channels(ranked.len())].to_vec();
                loud.sort_unstable();
                loud
            };
            key_order = Some(ranked.iter().map(first).collect::<Vec<_>>().into());
        }
        Ok((Scheme::Packed(scheme), Basis { keys, values: turn(self.rotate_v), key_order, smooth: None }))
    }

    /// A layer that stores one tensor in this form and the other one in 8 bits, which cost next to nothing.
    ///
    /// # Errors
    /// As [`Template::layer`].
    pub fn alone(&self, form: Form, ranked: &[Vec<u16>]) -> Result<(Scheme, Basis), SchemeError> {
        match form.tensor {
            Tensor::K => self.layer(form, Form::values(8), ranked),
            Tensor::V => self.layer(Form::keys(8, 0), form, ranked),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_between_and_beyond_the_measured_ones_are_derived() {
        let measured: Sensitivity =
            [(FORMS[0], 0.16), (FORMS[2], 0.04), (FORMS[6], 0.09)].into_iter().map(|(f, x)| ((0, f), x)).collect();
        let all = complete(&measured, 1, 64);
        assert_eq!(all.len(), FORMS.len());
        let near = |form: usize, want: f64| (all[&(0, FORMS[form])] / want - 1.0).abs() < 1e-9;
        // An eighth is half way to a quarter; 3 bits are half a bit beyond it, values of 3 bits one beyond 2.
        assert!(near(1, 0.08) && near(4, 0.02) && near(7, 0.0225), "{all:?}");
    }

    #[test]
    fn a_template_keeps_all_but_the_bits() {
        let kvant_kv::Scheme::Packed(scheme) = "k4v4g64w128s4p512.mse".parse().unwrap() else { panic!() };
        let template = Template { scheme, rotate_k: true, rotate_v: true };
        let ranked = vec![(0..64u16).rev().collect::<Vec<_>>(); 3];
        let (scheme, basis) = template.layer(FORMS[1], FORMS[7], &ranked).unwrap();
        assert_eq!(scheme.to_string(), "k2l8v3g64w128s4p512.mse");
        assert_eq!(basis.key_order.unwrap()[2], (56..64).collect::<Vec<u16>>());
        assert_eq!((basis.keys, basis.values), (Turn::None, Turn::Plain));
        assert_eq!(template.alone(FORMS[5], &ranked).unwrap().1.keys, Turn::Plain);
        assert_eq!(template.alone(FORMS[6], &ranked).unwrap().0.to_string(), "k8v2g64w128s4p512.mse");
    }
}

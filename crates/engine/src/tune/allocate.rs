//! Forms under a budget. In: what each form costs in each layer; out: one form of keys and one of values per layer.
//!
//! From the cheapest forms on, the change that saves most divergence per bit is made, whatever number of steps it jumps, as
//! long as one fits: the convex hull of each tensor's forms, walked in the order of its slopes.
//! NOT here: measuring (session.rs).

use super::{FORMS, Form, Sensitivity, Tensor};

/// What was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Keys and values of each layer.
    pub layers: Vec<(Form, Form)>,
    /// Bits of a code, averaged over keys and values of all layers (scales and zeros not counted).
    pub code_bits: f64,
    /// Sum of the measured divergences.
    pub expected: f64,
}

/// Chooses forms of at most `code_bits` bits a code on average. None when even the cheapest take more, or a form's cost is
/// unknown (no number).
pub fn allocate(costs: &Sensitivity, layers: usize, head_dim: usize, code_bits: f64) -> Option<Allocation> {
    let forms = |tensor| FORMS.into_iter().filter(move |f| f.tensor == tensor);
    let cheapest = |tensor| forms(tensor).min_by(|a, b| a.code_bits(head_dim).total_cmp(&b.code_bits(head_dim)));
    let (k, v) = (cheapest(Tensor::K)?, cheapest(Tensor::V)?);
    let mut chosen: Vec<Form> = (0..layers).flat_map(|_| [k, v]).collect();
    let cost = |at: usize, form: Form| costs.get(&(at / 2, form)).copied().filter(|x| x.is_finite());
    let mut left = (code_bits - chosen.iter().map(|f| f.code_bits(head_dim)).sum::<f64>() / chosen.len() as f64)
        * chosen.len() as f64
        + 1e-9;
    if left < 0.0 {
        return None;
    }
    loop {
        let mut best: Option<(f64, f64, usize, Form)> = None;
        for (at, &now) in chosen.iter().enumerate() {
            for form in forms(now.tensor) {
                let bits = form.code_bits(head_dim) - now.code_bits(head_dim);
                if bits <= 0.0 || bits > left {
                    continue;
                }
                let slope = (cost(at, now)? - cost(at, form)?) / bits;
                if slope > best.map_or(0.0, |b| b.0) {
                    best = Some((slope, bits, at, form));
                }
            }
        }
        let Some((_, bits, at, form)) = best else { break };
        chosen[at] = form;
        left -= bits;
    }
    let expected = chosen.iter().enumerate().map(|(at, &form)| cost(at, form)).sum::<Option<f64>>()?;
    let code_bits = chosen.iter().map(|f| f.code_bits(head_dim)).sum::<f64>() / chosen.len() as f64;
    Some(Allocation { layers: chosen.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(), code_bits, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layer 0's keys are worth many bits, its values none; layer 1 wants a little of both.
    fn costs() -> Sensitivity {
        let mut costs = Sensitivity::new();
        for form in FORMS {
            let steps = form.code_bits(64) - 2.0;
            for (layer, scale) in [(0, if form.tensor == Tensor::K { 1.0 } else { 1e-6 }), (1, 0.01)] {
                costs.insert((layer, form), scale * 4f64.powf(-steps));
            }
        }
        costs
    }

    #[test]
    fn bits_go_where_they_save_most_and_never_beyond_the_budget() {
        let mut last = f64::INFINITY;
        for budget in [2.0, 2.1, 2.25, 2.5, 3.0, 4.0] {
            let a = allocate(&costs(), 2, 64, budget).unwrap();
            assert!(a.code_bits <= budget + 1e-6 && a.expected <= last, "{budget}: {a:?}");
            last = a.expected;
        }
        let a = allocate(&costs(), 2, 64, 2.5).unwrap();
        assert_eq!((a.layers[0].0.bits, a.layers[0].1.bits), (4, 2), "{a:?}");
        assert_eq!(allocate(&costs(), 2, 64, 4.0).unwrap().code_bits, 4.0);
        assert!(allocate(&costs(), 2, 64, 1.9).is_none());
        let mut broken = costs();
        broken.insert((1, FORMS[0]), f64::NAN);
        assert!(allocate(&broken, 2, 64, 3.0).is_none());
    }
}

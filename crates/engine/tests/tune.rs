//! Tuning a tiny model: forms cost what they should, a tuned file beats the uniform scheme of as many bits, loud channels are
//! those that the weights make loud.

mod tiny_model;

use kvant_engine::eval::{Contestant, Scored, Settings, evaluate};
use kvant_engine::tune::{FORMS, Sensitivity, Session, Template, allocate};
use kvant_engine::{LoadedModel, Products, Schemes};
use kvant_kv::Scheme;
use std::sync::Arc;
use tiny_model::Tiny;

const CTX: usize = 384;

fn tokens(seed: usize) -> Vec<u32> {
    (0..CTX).map(|i| ((i * 37 + seed * 101 + i * i * 7) % 256) as u32).collect()
}

#[test]
fn a_tuned_file_beats_the_uniform_scheme_of_as_many_bits() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny { layers: 3, ..Tiny::default() };
    let path = tiny.parts().write(folder.path(), "tiny.gguf");
    let model = Arc::new(LoadedModel::load(&path, 2, Products::Exact, &|_, _| {}).unwrap());
    let Scheme::Packed(scheme) = "k2v2g32w32s4.mse".parse().unwrap() else { panic!("packed") };
    let template = Template { scheme, rotate_k: false, rotate_v: true };
    let mut session = Session::new(model.clone(), tokens(1), 2).unwrap();
    let mut costs = Sensitivity::new();
    for layer in 0..tiny.layers {
        for form in FORMS {
            costs.insert((layer, form), session.measure(layer, form, &template).unwrap());
        }
        // More bits never cost more, by much more than chance.
        let cost = |i: usize| costs[&(layer, FORMS[i])];
        assert!(cost(0) > cost(5) && cost(3) > cost(5) && cost(6) > cost(7) && cost(7) > cost(8), "{costs:?}");
        assert!((0..9).all(|i| cost(i).is_finite() && cost(i) > 0.0), "{costs:?}");
    }
    // Measured twice, the same: what a layer costs depends on nothing measured before.
    let again = session.measure(1, FORMS[2], &template).unwrap();
    assert_eq!(again.to_bits(), costs[&(1, FORMS[2])].to_bits());

    let chosen = allocate(&costs, tiny.layers, tiny.head_dim, 3.0).unwrap();
    let layers = chosen.layers.iter().zip(session.ranked());
    let parts = layers.map(|(&(k, v), ranked)| template.layer(k, v, ranked).unwrap()).collect();
    let contestant = |schemes| Contestant::scheme(schemes, tiny.head_dim);
    let uniform = "k3v3g32w32s4.mse".parse().unwrap();
    let contestants = [contestant(Schemes::of_parts(parts)), contestant(Schemes::uniform(uniform, tiny.layers))];
    let settings = Settings { ctx: CTX, scored: Scored::SecondHalf, threads: 2, kernel: None };
    // Two other texts than the one that was tuned on.
    let texts = [tokens(5), tokens(9)];
    let chunks: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let found = evaluate(&model, &chunks, &contestants, &settings, &mut |_, _| {}).unwrap();
    let [tuned, uniform] = [found.rows[0].kld_mean, found.rows[1].kld_mean];
    assert!(chosen.code_bits <= 3.0 && tuned <= uniform, "tuned {tuned}, uniform {uniform}, {chosen:?}");
}

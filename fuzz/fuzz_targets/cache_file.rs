//! Files of `--save-cache`. In: any bytes, with the checksum that belongs to them (else the fuzzer would stop at it); out: a
//! refusal, or a session that a request can go on from. Never a panic, and nothing stays behind a refusal.
#![no_main]

use kvant_engine::{Arm, Engine, EngineOptions, Limits, LoadedModel, Products, Request, load_schemes};
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::sync::Arc;

struct Lab {
    engine: Engine,
    path: PathBuf,
    /// What stands before the schemes: magic, version, the model's sum.
    model: [u8; 32],
}

thread_local! {
    static LAB: RefCell<Lab> = RefCell::new(lab());
}

fn lab() -> Lab {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models/llama");
    let model = std::env::var_os("KVANT_FUZZ_MODEL").map_or(model, PathBuf::from);
    let loaded = Arc::new(LoadedModel::load(&model, 1, Products::Exact, &|_, _| {}).expect("the golden model"));
    let schemes = load_schemes("k4v4g32w8s2p64", loaded.config().layers).expect("a scheme");
    // A budget, so that a header which promises gigabytes is refused and not believed.
    let limits = Limits { kv_memory: Some(64 << 20), ..Limits::default() };
    let model = loaded.sha256().expect("its files");
    let options = EngineOptions { threads: 1, kernel: None, arm: Arm::Fused, schemes, limits };
    let mut engine = Engine::new(loaded, options).expect("an engine");
    let path = std::env::temp_dir().join(format!("kvant-fuzz-{}", std::process::id()));
    if let Some(folder) = std::env::var_os("KVANT_FUZZ_SEEDS") {
        for n in [2u32, 40, 200] {
            let tokens: Vec<u32> = (0..n).map(|i| i % 90).collect();
            engine.save_prompt(&tokens, &path).expect("a seed");
            let bytes = std::fs::read(&path).expect("the seed");
            std::fs::write(Path::new(&folder).join(format!("seed-{n}")), &bytes[..bytes.len() - 32]).expect("a folder");
        }
    }
    Lab { engine, path, model }
}

fuzz_target!(|data: &[u8]| {
    LAB.with_borrow_mut(|lab| {
        let mut bytes = data.to_vec();
        // The model's sum is as hard to guess as the checksum.
        if let Some(sum) = bytes.get_mut(12..44) {
            sum.copy_from_slice(&lab.model);
        }
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        std::fs::write(&lab.path, &bytes).expect("a temporary folder");
        match lab.engine.restore_prompt(&lab.path) {
            Ok(tokens) => {
                let mut prompt = tokens;
                prompt.push(1);
                prompt.truncate(lab.engine.model().config().context);
                // Records of any numbers may give any numbers: what counts is that it says so.
                let _ = lab.engine.generate_from_session(Request::greedy(prompt, 2), &mut |_| Continue(()));
            }
            Err(_) => assert_eq!(lab.engine.status().blocks_used, 0, "a refusal leaves nothing behind"),
        }
    });
});

//! What commands that decode share: the model with its progress bar, the choice of scheme and arm, prompts as tokens.
//! In: flags; out: the engine's own types. NOT here: decoding (the engine), printing.

use crate::args::ArmName;
use crate::failure::{Failure, SCHEME_HINT};
use crate::{models, output, progress};
use anyhow::Result;
use kvant_engine::cuda::Weights;
use kvant_engine::model::Config;
use kvant_engine::tokenizer::Tokenizer;
use kvant_engine::{
    Arm, Engine, EngineOptions, Event, Limits, LoadedModel, Message, Products, Schemes, Source, load_schemes,
};
use kvant_kv::cuda::GpuCache;
use std::path::PathBuf;
use std::sync::Arc;

/// A model whose header has been read: what flags ask for is checked against it before anything slow begins.
pub struct Located {
    path: PathBuf,
    /// The numbers of the model.
    pub config: Config,
}

/// Finds the model that `--model` names and reads its header.
///
/// # Errors
/// [`Failure`] for a model that is not there or cannot be used.
pub fn locate(model: &str) -> Result<Located> {
    let path = models::find(model)?;
    let config = Source::open(&path).and_then(|source| source.config()).map_err(Failure::from)?;
    Ok(Located { path, config })
}

impl Located {
    /// Where it lies.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// The model's tokenizer, without its weights.
    ///
    /// # Errors
    /// [`Failure`] for a model that has none that can be used.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Source::open(&self.path).and_then(|source| source.tokenizer()).map_err(Failure::from)?;
        let none = || Failure::input("the model brings no tokenizer", "add its tokenizer.json to the model's folder");
        Ok(tokenizer.ok_or_else(none)?)
    }
}

/// Loads a model, with a bar.
///
/// # Errors
/// [`Failure`] for a model that cannot be used.
pub fn load(model: &Located, threads: usize) -> Result<Arc<LoadedModel>> {
    load_for(model, threads, Products::default())
}

/// The same with other products.
///
/// # Errors
/// As [`load`].
pub fn load_for(model: &Located, threads: usize, products: Products) -> Result<Arc<LoadedModel>> {
    load_under(progress::percent("load the model"), model, threads, products)
}

/// [`load`] without a bar.
///
/// # Errors
/// As [`load`].
pub fn load_silently(model: &Located, threads: usize) -> Result<Arc<LoadedModel>> {
    load_under(indicatif::ProgressBar::hidden(), model, threads, Products::default())
}

fn load_under(
    bar: indicatif::ProgressBar,
    model: &Located,
    threads: usize,
    products: Products,
) -> Result<Arc<LoadedModel>> {
    let loaded = LoadedModel::load(&model.path, threads, products, &|done, all| {
        bar.set_length(all);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(Arc::new(loaded.map_err(Failure::from)?))
}

/// The preset that costs accuracy one should know of.
const SMALL: kvant_engine::presets::Preset = kvant_engine::presets::PRESETS[2];

/// Says so when what a command decodes with is the preset `small`, by its name or in full.
pub fn warn_of(kv: &str) {
    if kv == SMALL.name || kv == SMALL.scheme {
        output::note(
            "warning: the preset small gives other answers than f16 often enough to notice; docs/accuracy.md says how often",
        );
    }
}

/// Whether the schemes say which channels are loud and bring their codebooks, before a model is loaded for them.
///
/// # Errors
/// [`Failure`] names the first layer where they do not.
pub fn check_schemes(schemes: &Schemes, config: &Config) -> Result<(), Failure> {
    Ok(schemes.check(&config.shape)?)
}

/// The schemes and arm of a command that takes both: the default of each follows the other, contradictions are errors.
///
/// # Errors
/// [`Failure`] for an unknown scheme or file, and for an arm that does not go with the scheme.
pub fn schemes_and_arm(kv: Option<&str>, arm: Option<ArmName>, layers: usize) -> Result<(Schemes, Arm)> {
    let text = kv.unwrap_or(match arm {
        Some(arm @ (ArmName::F16 | ArmName::Bf16)) => arm.name(),
        _ => crate::args::DEFAULT_SCHEME,
    });
    let schemes = load_schemes(text, layers).map_err(Failure::from)?;
    warn_of(text);
    let all = |arm: Arm| schemes.layers().iter().all(|s| Arm::of(*s) == arm);
    let plain = schemes.layers().iter().all(|s| s.packed().is_none());
    let arm = match arm {
        None if all(Arm::F16) => Arm::F16,
        None if all(Arm::Bf16) => Arm::Bf16,
        // Fused reads every layer as it is stored, plain ones of both kinds among them.
        None => Arm::Fused,
        Some(name @ (ArmName::F16 | ArmName::Bf16)) if !all(name.arm()) => {
            return Err(Failure::input(
                format!("--arm {0} keeps a plain {0} cache, so --kv {text} would have no effect", name.name()),
                "leave one of the two out",
            )
            .into());
        }
        Some(name @ (ArmName::Fused | ArmName::DequantOnce | ArmName::DequantStep)) if plain => {
            return Err(Failure::input(
                format!("--arm {} needs a packed scheme, and --kv {text} packs nothing", name.name()),
                SCHEME_HINT,
            )
            .into());
        }
        Some(name) => name.arm(),
    };
    Ok((schemes, arm))
}

/// Whether `--kv`, when it is no file, says how to store tokens: before any model is opened.
///
/// # Errors
/// [`Failure`] says what is wrong with it.
pub fn check_text(kv: Option<&str>) -> Result<()> {
    if let Some(kv) = kv.filter(|kv| !kvant_engine::schemes::is_file(kv)) {
        kvant_engine::schemes::parse_layer(kv).map_err(Failure::from)?;
    }
    Ok(())
}

/// An engine over a model, without limits.
///
/// # Errors
/// [`Failure`] for what the engine refuses.
pub fn engine(
    model: &Arc<LoadedModel>,
    threads: usize,
    kernel: Option<&str>,
    arm: Arm,
    schemes: Schemes,
) -> Result<Engine> {
    limited_engine(model, threads, kernel, arm, schemes, Limits::default())
}

/// An engine that takes on no more than `limits` say.
///
/// # Errors
/// As [`engine`].
pub fn limited_engine(
    model: &Arc<LoadedModel>,
    threads: usize,
    kernel: Option<&str>,
    arm: Arm,
    schemes: Schemes,
    limits: Limits,
) -> Result<Engine> {
    let options = EngineOptions { threads, kernel: kernel.map(str::to_string), arm, schemes, limits };
    Ok(Engine::new(model.clone(), options).map_err(Failure::from)?)
}

/// A model's tokenizer and numbers, and its weights on the GPU, with a bar.
///
/// # Errors
/// [`Failure`] for a model that cannot be used, or not on a GPU, and for a machine without one.
pub fn load_on_gpu(model: &Located) -> Result<(Arc<LoadedModel>, Weights)> {
    let gpu = kvant_kv::cuda::Gpu::open(0).map_err(Failure::from)?;
    let source = Source::open(&model.path).map_err(Failure::from)?;
    let loaded = LoadedModel::without_weights(&source, &model.path).map_err(Failure::from)?;
    let bar = progress::percent("load the model");
    let weights = Weights::load(&gpu, &source, &|done, all| {
        bar.set_length(all);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok((Arc::new(loaded), weights.map_err(Failure::from)?))
}

/// Whether the GPU's cache stores these schemes, before weights are loaded for them.
///
/// # Errors
/// [`Failure`] names what it does not read.
pub fn check_on_gpu(schemes: &Schemes, config: &Config, arm: Arm) -> Result<(), Failure> {
    let layers: Vec<_> = schemes.layers().iter().enumerate().map(|(i, &scheme)| config.layer(i, scheme)).collect();
    GpuCache::bytes_of(&layers, arm, 1, 1)?;
    Ok(())
}

/// A model and an engine over it on the device that flags name.
///
/// # Errors
/// [`Failure`] for a model or an engine that cannot be had there.
pub fn model_and_engine(
    machine: &crate::args::Machine,
    located: &Located,
    kernel: Option<&str>,
    arm: Arm,
    schemes: Schemes,
    limits: Limits,
) -> Result<(Arc<LoadedModel>, Engine)> {
    if machine.on_gpu()? {
        for (flag, given) in [("--kernel", kernel.is_some()), ("--swap-dir", limits.swap.is_some())] {
            if given {
                let hint = "leave it out with --device cuda";
                return Err(Failure::input(format!("{flag} is of the CPU's engine"), hint).into());
            }
        }
        check_on_gpu(&schemes, &located.config, arm)?;
        let (model, weights) = load_on_gpu(located)?;
        let kernel = kernel.map(str::to_string);
        let options = EngineOptions { threads: machine.host_threads(), kernel, arm, schemes, limits };
        let engine = Engine::on_card(model.clone(), weights, options).map_err(Failure::from)?;
        return Ok((model, engine));
    }
    let threads = machine.threads()?;
    let model = load(located, threads)?;
    let engine = limited_engine(&model, threads, kernel, arm, schemes, limits)?;
    Ok((model, engine))
}

/// Tokens of prompts, each in the chat template when `chat`.
///
/// # Errors
/// [`Failure`] for a model without tokenizer or template.
pub fn tokens(model: &LoadedModel, prompts: &[String], chat: bool) -> Result<Vec<Vec<u32>>> {
    let one = |text: &String| {
        if chat { model.encode_chat(&[Message::user(text.clone())]) } else { model.encode(text) }
    };
    Ok(prompts.iter().map(one).collect::<Result<_, _>>().map_err(Failure::from)?)
}

/// A bar over all prompts' tokens, moved by [`Prefill::event`].
pub struct Prefill {
    bar: indicatif::ProgressBar,
    done: Vec<usize>,
}

impl Prefill {
    /// A bar for these prompts.
    pub fn new(prompts: &[Vec<u32>]) -> Self {
        let all: usize = prompts.iter().map(Vec::len).sum();
        Self { bar: progress::tokens("prefill", all as u64), done: vec![0; prompts.len()] }
    }

    /// Moves the bar; it goes away when every prompt is done.
    pub fn event(&mut self, event: &Event) {
        let Event::Prefilled { request, tokens, .. } = event else { return };
        if let Some(done) = self.done.get_mut(*request) {
            *done = *tokens;
        }
        let sum = self.done.iter().sum::<usize>() as u64;
        self.bar.set_position(sum);
        if self.bar.length().is_none_or(|all| sum >= all) {
            self.bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheme_and_arm_follow_each_other() {
        let pick = |kv, arm| schemes_and_arm(kv, arm, 2).map(|(s, a)| (s.to_string(), a));
        assert_eq!(pick(None, None).unwrap(), ("k4v4g64w128s4p512.rotv".into(), Arm::Fused));
        assert_eq!(pick(Some("safe"), None).unwrap(), ("k8v8g64w128s4p512".into(), Arm::Fused));
        assert_eq!(pick(Some("f16"), None).unwrap(), ("f16".into(), Arm::F16));
        assert_eq!(pick(None, Some(ArmName::F16)).unwrap(), ("f16".into(), Arm::F16));
        assert_eq!(pick(Some("k2v2g32"), Some(ArmName::DequantOnce)).unwrap(), ("k2v2g32".into(), Arm::DequantOnce));
        assert!(pick(Some("k2v2g32"), Some(ArmName::F16)).is_err());
        assert!(pick(Some("f16"), Some(ArmName::Fused)).is_err());
        assert!(pick(Some("k9"), None).is_err());
        assert_eq!(pick(Some("bf16"), None).unwrap(), ("bf16".into(), Arm::Bf16));
        assert_eq!(pick(None, Some(ArmName::Bf16)).unwrap(), ("bf16".into(), Arm::Bf16));
        for (kv, arm) in [("f16", ArmName::Bf16), ("bf16", ArmName::F16), ("k2v2g32", ArmName::Bf16)] {
            let e = pick(Some(kv), Some(arm)).unwrap_err().to_string();
            assert!(e.contains(&format!("keeps a plain {} cache, so --kv {kv} would", arm.name())), "{e}");
        }
        let e = pick(Some("bf16"), Some(ArmName::DequantStep)).unwrap_err().to_string();
        assert!(e.contains("--kv bf16 packs nothing"), "{e}");
    }

    /// An arm that stores all layers alike must not be chosen for a file that says otherwise.
    #[test]
    fn a_file_of_both_plain_formats_is_stored_as_it_says() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        std::fs::write(file.path(), "default = \"f16\"\n[layers]\n1 = \"bf16\"\n").unwrap();
        let (schemes, arm) = schemes_and_arm(file.path().to_str(), None, 2).unwrap();
        assert_eq!((schemes.to_string().as_str(), arm), ("0:f16,1:bf16", Arm::Fused));
    }
}

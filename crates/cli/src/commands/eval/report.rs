//! What an evaluation shows: rows as JSON, as a table and as CSV. In: contestants and figures; out: text.
//! NOT here: the picture (picture.rs), computing anything (the engine).

use crate::args::{Activations, ScoreName};
use crate::table::{Align, Table};
use kvant_engine::Schemes;
use kvant_engine::eval::{Contestant, Figures, LENGTHS};
use kvant_engine::model::Config;
use kvant_kv::Scheme;
use serde::{Serialize, Serializer};

/// All that a run found.
#[derive(Serialize)]
pub(super) struct Report {
    pub rows: Vec<Row>,
    pub base: Row,
    pub model: String,
    pub text: TextInfo,
    pub ctx: usize,
    pub chunks: usize,
    pub skip_chunks: usize,
    #[serde(serialize_with = "score_name")]
    pub score: ScoreName,
    #[serde(serialize_with = "activations_name")]
    pub activations: Activations,
    pub kernel: String,
    pub products: &'static str,
    pub threads: usize,
    pub seconds: f64,
    pub version: &'static str,
}

/// Which text.
#[derive(Serialize)]
pub(super) struct TextInfo {
    pub path: String,
    pub sha256: String,
    pub tokens: usize,
}

/// One cache.
pub(super) struct Row {
    pub scheme: String,
    /// Schemes by layer, where they differ.
    pub layers: Option<String>,
    pub imitated: bool,
    pub bits: f64,
    /// Of the whole cache at ctx.
    pub whole_bits: f64,
    /// The same at [`LENGTHS`].
    pub at: [f64; LENGTHS.len()],
    pub figures: Figures,
}

/// A value's name on the command line.
fn name_of(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}

fn score_name<S: Serializer>(value: &ScoreName, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&name_of(value))
}

fn activations_name<S: Serializer>(value: &Activations, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&name_of(value))
}

impl Row {
    pub(super) fn new(contestant: &Contestant, imitated: bool, figures: Figures, ctx: usize) -> Self {
        let layers = contestant.schemes.to_string();
        Self {
            layers: (!imitated && layers != contestant.name).then_some(layers),
            scheme: contestant.name.clone(),
            imitated,
            bits: contestant.bits.packed(),
            whole_bits: contestant.bits.whole(ctx),
            at: LENGTHS.map(|len| contestant.bits.whole(len)),
            figures,
        }
    }

    /// The row of the plain f16 cache.
    pub(super) fn base(figures: Figures, config: &Config, ctx: usize) -> Self {
        let f16 = Contestant::scheme(Schemes::uniform(Scheme::F16, config.layers), config.shape.head_dim);
        Self::new(&f16, false, figures, ctx)
    }

    /// Where its figures come from.
    pub(super) fn source(&self) -> &'static str {
        if self.imitated { "imitated in this run" } else { "measured in this run" }
    }
}

#[derive(Serialize)]
struct JsonFigures {
    positions: usize,
    ppl: f64,
    ppl_ratio: f64,
    kld_mean: f64,
    kld_p99: f64,
    top1_same: f64,
}

impl From<&Figures> for JsonFigures {
    fn from(f: &Figures) -> Self {
        Self {
            positions: f.positions,
            ppl: f.ppl,
            ppl_ratio: f.ppl_ratio,
            kld_mean: f.kld_mean,
            kld_p99: f.kld_p99,
            top1_same: f.top1_same,
        }
    }
}

#[derive(Serialize)]
struct JsonBucket {
    from: usize,
    /// null: to the end.
    to: Option<usize>,
    #[serde(flatten)]
    figures: JsonFigures,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    scheme: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<&'a str>,
    source: &'static str,
    bits: f64,
    whole_bits: f64,
    whole_bits_2k: f64,
    whole_bits_8k: f64,
    whole_bits_32k: f64,
    #[serde(flatten)]
    figures: JsonFigures,
    buckets: Vec<JsonBucket>,
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let [whole_bits_2k, whole_bits_8k, whole_bits_32k] = self.at;
        let buckets = self.figures.buckets.iter();
        JsonRow {
            scheme: &self.scheme,
            layers: self.layers.as_deref(),
            source: self.source(),
            bits: self.bits,
            whole_bits: self.whole_bits,
            whole_bits_2k,
            whole_bits_8k,
            whole_bits_32k,
            figures: (&self.figures).into(),
            buckets: buckets.map(|b| JsonBucket { from: b.from, to: b.to, figures: (&b.figures).into() }).collect(),
        }
        .serialize(serializer)
    }
}

impl Report {
    /// What was followed, in one line.
    pub(super) fn subject(&self) -> String {
        let skipped =
            if self.skip_chunks > 0 { format!(" behind {} left out", self.skip_chunks) } else { String::new() };
        format!(
            "{}, {} chunk{} of {} tokens{skipped}, {} positions scored ({}), products {}, kernel {}, {} threads",
            self.text.path,
            self.chunks,
            if self.chunks == 1 { "" } else { "s" },
            self.ctx,
            self.base.figures.positions,
            name_of(&self.score),
            self.products,
            self.kernel,
            self.threads
        )
    }

    /// The base, then the others.
    pub(super) fn all(&self) -> impl Iterator<Item = &Row> {
        [&self.base].into_iter().chain(&self.rows)
    }
}

/// A divergence with three digits, whatever its size.
pub(super) fn nats(kld: f64) -> String {
    match kld {
        0.0 => "0".into(),
        k if k.abs() < 1e-4 => format!("{k:.2e}"),
        k => format!("{k:.5}"),
    }
}

/// The tables.
pub(super) fn render(report: &Report) -> String {
    let mut table = Table::new([
        ("cache", Align::Left),
        ("bits", Align::Right),
        ("whole cache", Align::Right),
        ("at 8k", Align::Right),
        ("perplexity", Align::Right),
        ("vs f16", Align::Right),
        ("KLD mean", Align::Right),
        ("KLD 99 %", Align::Right),
        ("same first", Align::Right),
        ("", Align::Left),
    ]);
    for row in report.all() {
        let f = &row.figures;
        table.row([
            row.scheme.clone(),
            format!("{:.2}", row.bits),
            format!("{:.2}", row.whole_bits),
            format!("{:.2}", row.at[1]),
            format!("{:.3}", f.ppl),
            format!("{:.4}", f.ppl_ratio),
            nats(f.kld_mean),
            nats(f.kld_p99),
            format!("{:.1} %", 100.0 * f.top1_same),
            if row.imitated { "imitated".into() } else { String::new() },
        ]);
    }
    let mut text = format!("{}\n\n{}", report.subject(), table.render());
    if report.base.figures.buckets.len() > 1 {
        text += &format!("\nBy position\n\n{}", by_position(report));
    }
    text
}

fn by_position(report: &Report) -> String {
    let mut table = Table::new([
        ("cache", Align::Left),
        ("positions", Align::Left),
        ("scored", Align::Right),
        ("vs f16", Align::Right),
        ("KLD mean", Align::Right),
        ("KLD 99 %", Align::Right),
        ("same first", Align::Right),
    ]);
    for row in &report.rows {
        for b in &row.figures.buckets {
            table.row([
                row.scheme.clone(),
                b.to.map_or_else(|| format!("{}-", b.from), |to| format!("{}-{}", b.from, to - 1)),
                b.figures.positions.to_string(),
                format!("{:.4}", b.figures.ppl_ratio),
                nats(b.figures.kld_mean),
                nats(b.figures.kld_p99),
                format!("{:.1} %", 100.0 * b.figures.top1_same),
            ]);
        }
    }
    table.render()
}

/// One line per cache, the base first.
pub(super) fn csv(report: &Report) -> String {
    let mut text = "scheme,source,bits,whole_bits,whole_bits_2k,whole_bits_8k,whole_bits_32k,positions,ppl,ppl_ratio,\
                    kld_mean,kld_p99,top1_same,ctx,chunks,text_sha256\n"
        .to_owned();
    for row in report.all() {
        let (f, [at_2k, at_8k, at_32k]) = (&row.figures, row.at);
        let scheme = row.scheme.replace('"', "\"\"");
        text += &format!(
            "\"{scheme}\",{},{},{},{at_2k},{at_8k},{at_32k},{},{},{},{},{},{},{},{},{}\n",
            row.source(),
            row.bits,
            row.whole_bits,
            f.positions,
            f.ppl,
            f.ppl_ratio,
            f.kld_mean,
            f.kld_p99,
            f.top1_same,
            report.ctx,
            report.chunks,
            report.text.sha256
        );
    }
    text
}

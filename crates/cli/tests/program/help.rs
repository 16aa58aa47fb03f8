//! Help texts as snapshots: a flag that appears, goes or changes its default shows in the diff.

use crate::run::kvant;

macro_rules! help {
    ($name:ident, $($arg:literal),*) => {
        #[test]
        fn $name() {
            let run = kvant([$($arg,)* "--help"]);
            assert_eq!(run.code, Some(0), "{run:?}");
            assert_eq!(run.stderr, "");
            assert!(run.stdout.contains("Examples:"), "every command shows examples");
            insta::assert_snapshot!(run.stdout);
        }
    };
}

help!(program,);
help!(pull, "pull");
help!(generate, "generate");
help!(serve, "serve");
help!(bench, "bench");
help!(bench_attend, "bench", "attend");
help!(bench_decode, "bench", "decode");
help!(bench_layers, "bench", "layers");
help!(bench_stacking, "bench", "stacking");
help!(bench_requests, "bench", "requests");
help!(bench_sharing, "bench", "sharing");
help!(bench_passes, "bench", "passes");
help!(bench_splits, "bench", "splits");
help!(roofline, "roofline");
help!(eval, "eval");
help!(tune, "tune");
help!(info, "info");
help!(demo, "demo");

#[test]
fn version() {
    let run = kvant(["--version"]);
    assert_eq!((run.code, run.stdout), (Some(0), format!("kvant {}\n", env!("CARGO_PKG_VERSION"))));
}

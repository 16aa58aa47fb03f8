//! kvant: the program. In: a command line; out: text or one JSON object on stdout, everything else on stderr, an exit code
//! (0 done, 2 bad input with a hint, 1 a proof that failed or a server without its engine). NOT here: what commands do (commands/).

mod args;
mod commands;
mod failure;
mod models;
mod output;
mod progress;
mod rss;
mod session;
mod shape_text;
mod table;
mod text;
mod units;

use args::{Cli, Command};
use clap::Parser;
use clap::error::ErrorKind;
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return finish(output::text("the help", &e.render().to_string()));
        }
        Err(e) => {
            let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
            return finish(Err(Failure::from_clap(&e, &words).into()));
        }
    };
    finish(run(cli.command))
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Pull(args) => commands::pull::run(&args),
        Command::Roofline(args) => commands::roofline::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Tune(args) => commands::tune::run(&args),
        Command::Info(args) => commands::info::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Demo(args) => commands::demo::run(&args),
    }
}

/// Turns a result into an exit code. What a user can cause brings its own hint; the general one is for the rest.
fn finish(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let failure = match error.downcast::<Failure>() {
        Ok(failure) => failure,
        Err(error) => Failure::input(
            format!("{error:#}"),
            "the command line is not at fault; check disk, memory and permissions, and report it if they are fine",
        ),
    };
    output::note(&failure);
    ExitCode::from(failure.code)
}

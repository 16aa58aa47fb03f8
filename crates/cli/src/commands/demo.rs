//! placeholder
use crate::args::DemoArgs;
/// Runs the command.
pub fn run(_args: &DemoArgs) -> anyhow::Result<()> {
    todo!()
}

//! placeholder
use crate::args::GenerateArgs;
/// Runs the command.
pub fn run(_args: &GenerateArgs) -> anyhow::Result<()> {
    todo!()
}

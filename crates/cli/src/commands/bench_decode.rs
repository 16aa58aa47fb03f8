//! placeholder
use crate::args::DecodeArgs;
/// Runs the command.
pub fn run(_args: &DecodeArgs) -> anyhow::Result<()> {
    todo!()
}

//! placeholder
use crate::args::AttendArgs;
/// Runs the command.
pub fn run(_args: &AttendArgs) -> anyhow::Result<()> {
    todo!()
}

//! One file a subcommand.

pub mod bootstrap;
pub mod doctor;
pub mod replay;
pub mod role;
pub mod wire_decode;

//! One file a subcommand.

pub mod bootstrap;
pub mod doctor;
pub mod replay;
pub mod role;
#[cfg(feature = "sim")]
pub mod sim;
pub mod wire_decode;

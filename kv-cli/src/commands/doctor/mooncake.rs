//! What doctor says of Mooncake.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::transport::Transport;
use serde::{Deserialize, Serialize};

use super::Check;
use super::trial::{self, Subject};
use crate::error::Result;

/// Opening the library takes under a second, ending it up to one; a busy machine is given time. A hang ends here.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is tried out.
pub struct Mooncake;

/// What was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    path: String,
    version: Option<String>,
    is_for_ascend: bool,
    forces_tcp: bool,
}

impl Subject for Mooncake {
    const NAME: &str = "mooncake";
    const LOOK: &str = "MC_LOG_LEVEL=INFO kvt doctor shows more; KV_MOONCAKE_LIB names another library";
    type Library = Library;

    fn prepare() {
        kv_transfer::mooncake::prepare_environment();
    }

    fn open() -> Result<(Arc<dyn Transport>, Library)> {
        let mooncake = crate::mooncake::open("127.0.0.1")?;
        let of = mooncake.library();
        let library = Library {
            path: of.path.display().to_string(),
            version: of.version,
            is_for_ascend: of.is_for_ascend,
            forces_tcp: of.forces_tcp,
        };
        Ok((Arc::new(mooncake), library))
    }
}

/// Whether it works.
pub fn check() -> Check {
    let trial = trial::run::<Mooncake>(PATIENCE);
    trial.check::<Mooncake>("transport: mooncake", trial.library.as_ref().map(described))
}

fn described(library: &Library) -> String {
    let build = if library.is_for_ascend { ", the build for Ascend (TCP alone without such a card)" } else { "" };
    let way = if library.forces_tcp {
        "MC_FORCE_TCP is set: over TCP"
    } else {
        "MC_FORCE_TCP is not set: it takes what it finds"
    };
    let version = library.version.as_deref().unwrap_or("of unknown version");
    format!("Mooncake {version} from {}{build}; {way}", library.path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_which_build_and_by_which_way() {
        let library = Library {
            path: "/x/libtransfer_engine.so".into(),
            version: Some("0.3.13".into()),
            is_for_ascend: true,
            forces_tcp: true,
        };
        let text = described(&library);
        for part in ["0.3.13", "/x/libtransfer_engine.so", "Ascend", "over TCP"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = described(&Library::default());
        assert!(text.contains("unknown version") && text.contains("takes what it finds"), "{text}");
    }
}

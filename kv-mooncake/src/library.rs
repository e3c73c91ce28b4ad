//! What was loaded: for `doctor`.

use std::path::PathBuf;

use crate::engine::Engine;
use crate::environment;

/// What was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryInfo {
    /// The library.
    pub path: PathBuf,
    /// Its release, where its installation tells.
    pub version: Option<String>,
    /// It is the build for Ascend cards: of use with TCP alone, without a card.
    pub is_for_ascend: bool,
    /// TCP is used whatever devices there are (`MC_FORCE_TCP`).
    pub forces_tcp: bool,
}

impl LibraryInfo {
    pub(crate) fn of(engine: &Engine) -> Self {
        let api = engine.api();
        Self {
            path: api.path().to_owned(),
            version: api.version(),
            is_for_ascend: api.is_for_ascend(),
            forces_tcp: environment::forces_tcp(),
        }
    }
}

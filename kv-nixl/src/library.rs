//! What was loaded: for `doctor`.

use std::path::{Path, PathBuf};

use crate::agent::Agent;

/// What was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryInfo {
    /// The library.
    pub path: PathBuf,
    /// Its release, where its installation tells.
    pub version: Option<String>,
    /// NIXL's plugins.
    pub plugins: Vec<String>,
    /// UCX's transport modules beside it: `cma`, `ib`, `cuda`, ..
    pub ucx_modules: Vec<String>,
}

impl LibraryInfo {
    pub(crate) fn of(agent: &Agent) -> Self {
        let api = agent.api();
        Self {
            path: api.path().to_owned(),
            version: api.version(),
            plugins: agent.plugins(),
            ucx_modules: ucx_modules(api.path()),
        }
    }
}

/// `libuct_cma.so` -> `cma`, of the `*.libs/ucx` folder beside the wheel's libraries.
fn ucx_modules(library: &Path) -> Vec<String> {
    let site = library.parent().and_then(Path::parent);
    let folders = site.and_then(|s| std::fs::read_dir(s).ok()).into_iter().flatten().flatten();
    let ucx = folders.map(|f| f.path().join("ucx")).find(|p| p.is_dir());
    let files = ucx.and_then(|p| std::fs::read_dir(p).ok()).into_iter().flatten().flatten();
    let mut out: Vec<String> = files
        .filter_map(|f| {
            let name = f.file_name().into_string().ok()?;
            Some(name.strip_prefix("libuct_")?.split(['.', '-']).next()?.to_owned())
        })
        .collect();
    out.sort();
    out.dedup();
    out
}

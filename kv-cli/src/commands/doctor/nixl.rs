//! What doctor says of NIXL.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::transport::Transport;
use serde::{Deserialize, Serialize};

use super::trial::{self, Subject, Trial};
use super::{Check, Status};
use crate::error::Result;

const NAME: &str = "transport: nixl";
/// Opening the library takes under a second; a busy machine is given time. A hang ends here.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is tried out.
pub struct Nixl;

/// What was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    path: String,
    version: Option<String>,
    plugins: Vec<String>,
    ucx_modules: Vec<String>,
}

impl Subject for Nixl {
    const NAME: &str = "nixl";
    const LOOK: &str =
        "NIXL_LOG_LEVEL=debug UCX_LOG_LEVEL=info kvt doctor shows more; KV_NIXL_LIB names another library";
    type Library = Library;

    fn prepare() {
        kv_transfer::nixl::prepare_environment();
    }

    fn open() -> Result<(Arc<dyn Transport>, Library)> {
        let nixl = crate::nixl::open()?;
        let of = nixl.library();
        let library = Library {
            path: of.path.display().to_string(),
            version: of.version,
            plugins: of.plugins,
            ucx_modules: of.ucx_modules,
        };
        Ok((Arc::new(nixl), library))
    }
}

/// The checks: whether it works, and how bytes go between ranks of one host. `copies`: whether the kernel permits that
/// one process reaches into another.
pub fn checks(copies: &std::result::Result<(), String>) -> Vec<Check> {
    let trial = trial::run::<Nixl>(PATIENCE);
    let tls = std::env::var("UCX_TLS").ok();
    let mut checks = vec![works(&trial, tls.as_deref())];
    if let (Some(library), Ok(_)) = (&trial.library, &trial.moved) {
        checks.push(same_host(library, copies, tls.as_deref()));
    }
    checks
}

fn works(trial: &Trial<Library>, tls: Option<&str>) -> Check {
    trial.check::<Nixl>(NAME, trial.library.as_ref().map(|library| described(library, tls)))
}

fn described(library: &Library, tls: Option<&str>) -> String {
    let list = |names: &[String]| if names.is_empty() { "none found".to_owned() } else { names.join(" ") };
    format!(
        "NIXL {} from {}; plugins: {}; UCX modules: {}; UCX_TLS {}",
        library.version.as_deref().unwrap_or("of unknown version"),
        library.path,
        list(&library.plugins),
        list(&library.ucx_modules),
        tls.map_or("not set".to_owned(), |tls| format!("is {tls:?}"))
    )
}

fn same_host(library: &Library, copies: &std::result::Result<(), String>, tls: Option<&str>) -> Check {
    let name = "nixl: same-host copies";
    let instead = "ranks on one host send by UCX's tcp, at a lower rate";
    if let Err(why) = copies {
        let detail = format!("copies into another process are refused ({why}): {instead}");
        return Check::new(name, Status::Warn, detail, "see tcp: same-host copies");
    }
    if !library.ucx_modules.iter().any(|m| m == "cma") {
        let detail = format!("this UCX has no module cma: {instead}");
        return Check::new(name, Status::Warn, detail, crate::nixl::VENDOR.install);
    }
    match tls.filter(|tls| !lets_copy(tls)) {
        Some(tls) => Check::new(
            name,
            Status::Warn,
            format!("UCX_TLS={tls} leaves them out: {instead}"),
            "unset UCX_TLS, or put cma into it",
        ),
        None => Check::new(name, Status::Ok, "UCX may copy by the kernel (cma)", ""),
    }
}

/// Whether this value of `UCX_TLS` leaves UCX its kernel copies. A list, or what is left out after `^`.
fn lets_copy(tls: &str) -> bool {
    let named = |list: &str| list.split(',').any(|t| ["cma", "sm", "shm", "mm"].contains(&t.trim()));
    match tls.strip_prefix('^') {
        Some(without) => !named(without),
        None => named(tls) || tls.split(',').any(|t| t.trim() == "all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CliError;

    fn library() -> Library {
        Library {
            path: "/x/libnixl_capi.so".into(),
            version: Some("1.5.1".into()),
            plugins: vec!["POSIX".into(), "UCX".into()],
            ucx_modules: vec!["cma".into(), "ib".into()],
        }
    }

    #[test]
    fn a_trial_that_went_well_says_what_was_loaded() {
        let trial = Trial { library: Some(library()), moved: Ok((8 << 20, Duration::from_micros(2500))) };
        let check = works(&trial, Some("tcp"));
        assert_eq!(check.status, Status::Ok);
        for part in ["8 MiB", "2.5 ms", "1.5.1", "/x/libnixl_capi.so", "POSIX UCX", "cma ib", "UCX_TLS is \"tcp\""] {
            assert!(check.detail.contains(part), "{part}: {}", check.detail);
        }
    }

    #[test]
    fn a_failure_says_whose_it_is_and_what_to_do() {
        let missing = Trial { library: None, moved: Err(CliError::new("tried: /a, /b").hint("get it")) };
        let check = works(&missing, None);
        assert_eq!((check.status, check.fix.as_str()), (Status::No, "get it"));
        let early = Trial { library: None, moved: Err(CliError::new("it ended: signal: 11")) };
        let check = works(&early, None);
        assert!(check.detail.starts_with("the library could not") && check.fix == Nixl::LOOK, "{check:?}");
        let crash = Trial { library: Some(library()), moved: Err(CliError::new("it ended: signal: 11")) };
        let check = works(&crash, None);
        assert!(check.status == Status::No && check.detail.contains("signal: 11") && check.detail.contains("1.5.1"));
        assert!(check.fix.contains("kvt doctor"), "{check:?}");
    }

    #[test]
    fn ways_between_ranks_of_one_host() {
        let status = |copies: std::result::Result<(), String>, tls| same_host(&library(), &copies, tls).status;
        assert_eq!(status(Ok(()), None), Status::Ok);
        assert_eq!(status(Err("Yama".into()), None), Status::Warn);
        assert_eq!(status(Ok(()), Some("tcp")), Status::Warn);
        assert_eq!(same_host(&Library::default(), &Ok(()), None).status, Status::Warn);
        for tls in ["all", "tcp,cma", "^ib", "sm,self"] {
            assert!(lets_copy(tls), "{tls}");
        }
        for tls in ["tcp", "tcp,self", "^cma", "^ib,sm"] {
            assert!(!lets_copy(tls), "{tls}");
        }
    }
}

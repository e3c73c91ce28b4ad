//! `KV_REQUIRE_BACKENDS=tcp,..`: a backend that is asked for and not here is a failure, never a skip.

use serde_json::Value;

use super::Step;
use crate::sh::{self, Result};

/// Names of the variable; tests read it too.
const VARIABLE: &str = "KV_REQUIRE_BACKENDS";

pub fn run() -> Result<Step> {
    let Ok(wanted) = std::env::var(VARIABLE) else {
        return Ok(Step::Skipped(format!(
            "{VARIABLE} is not set: a backend that is missing here only skips its tests"
        )));
    };
    let metadata = sh::metadata(&["--no-deps"])?;
    let have = features(&metadata);
    check(&wanted, &have).map(Step::Passed)
}

/// Backends are features of the package users add.
fn features(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .filter(|p| p["name"] == "kv-transfer")
        .filter_map(|p| p["features"].as_object())
        .flat_map(|f| f.keys().filter(|k| *k != "default").cloned())
        .collect()
}

fn check(wanted: &str, have: &[String]) -> Result<String> {
    let wanted: Vec<&str> = wanted.split(',').map(str::trim).filter(|w| !w.is_empty()).collect();
    match wanted.iter().find(|w| !have.iter().any(|h| h == *w)) {
        Some(missing) => {
            Err(format!("backend '{missing}' is required, but this workspace has only: {}", have.join(", ")))
        }
        None => Ok(wanted.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_backend_is_a_failure() {
        let have = vec!["tcp".to_owned()];
        assert_eq!(check("tcp", &have), Ok("tcp".into()));
        assert_eq!(check("", &have), Ok(String::new()));
        assert!(check("tcp, nixl", &have).unwrap_err().contains("backend 'nixl' is required"));
    }

    #[test]
    fn backends_are_features_of_the_users_package() {
        let metadata = serde_json::json!({"packages": [
            {"name": "kv-transfer", "features": {"default": ["tcp"], "tcp": []}},
            {"name": "other", "features": {"x": []}},
        ]});
        assert_eq!(features(&metadata), ["tcp"]);
    }
}

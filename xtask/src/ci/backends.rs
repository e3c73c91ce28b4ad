//! A backend that is asked for and that this workspace does not have is a failure, never a skip.

use serde_json::Value;

use super::{Step, required};
use crate::sh::{self, Result};

pub fn run() -> Result<Step> {
    let Some(wanted) = required::backends() else {
        return Ok(Step::Skipped(format!(
            "{} is not set: a backend that is missing here only skips its tests",
            required::VARIABLE
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

fn check(wanted: &[String], have: &[String]) -> Result<String> {
    match wanted.iter().find(|w| !have.contains(w)) {
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
        let have = ["tcp".to_owned()];
        assert_eq!(check(&have, &have), Ok("tcp".into()));
        assert_eq!(check(&[], &have), Ok(String::new()));
        assert!(check(&["tcp".into(), "nixl".into()], &have).unwrap_err().contains("backend 'nixl' is required"));
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

//! `KV_REQUIRE_BACKENDS=tcp,..`: the backends whose absence is a failure here, never a skip.

/// Name of the variable; tests read it too.
pub const VARIABLE: &str = "KV_REQUIRE_BACKENDS";

/// The backends asked for; `None` when the variable is not set.
pub fn backends() -> Option<Vec<String>> {
    std::env::var_os(VARIABLE).map(|text| parse(&text.to_string_lossy()))
}

fn parse(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|w| !w.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_between_commas() {
        assert_eq!(parse("tcp"), ["tcp"]);
        assert_eq!(parse(" tcp, nixl,"), ["tcp", "nixl"]);
        assert!(parse("").is_empty() && parse(" , ").is_empty());
    }
}

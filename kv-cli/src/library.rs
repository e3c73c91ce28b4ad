//! What a person is told when a vendor's library is not here, or does not start.

use crate::error::CliError;

/// Places that were tried and are named; the rest is counted.
const PLACES: usize = 4;

/// A library that a transport opens.
#[derive(Clone, Copy, Debug)]
pub struct Vendor {
    /// Name of the transport.
    pub transport: &'static str,
    /// The file.
    pub file: &'static str,
    /// How to get it.
    pub install: &'static str,
}

impl Vendor {
    /// The transport's error comes as text, so it is its text that is looked at. `otherwise`: what to do about a library
    /// that is here.
    pub fn failure(&self, text: &str, otherwise: &str) -> CliError {
        // It ends with advice of its own, and the list before may be long.
        let (seen, missing) = match text.split_once("; install it (") {
            Some((seen, _)) => (shortened(seen), true),
            None => (text.to_owned(), text.contains(self.file)),
        };
        let hint = if missing { self.install } else { otherwise };
        CliError::new(format!("cannot start the {} transport: {seen}", self.transport)).hint(hint)
    }
}

fn shortened(seen: &str) -> String {
    let mut places: Vec<_> = seen.split("; ").collect();
    let more = places.len().saturating_sub(PLACES);
    places.truncate(PLACES);
    let list = places.join("; ");
    if more > 0 { format!("{list}; and {more} more places") } else { list }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: Vendor = Vendor { transport: "x", file: "libx.so", install: "`cargo xtask setup x`" };

    #[test]
    fn a_missing_library_names_places_and_the_cure_once() {
        let text = |n: usize| {
            let places: String = (0..n).map(|i| format!("/p{i} (Python's packages): no such file; ")).collect();
            format!("libx.so is not to be had: {places}install it (`x`, or `y`), or set KV_X_LIB")
        };
        let e = LIBRARY.failure(&text(1), "look").one_line();
        assert!(e.contains("/p0 (Python's packages): no such file; `cargo xtask setup x`"), "{e}");
        assert!(e.starts_with("cannot start the x transport: ") && !e.contains("install it"), "{e}");
        let e = LIBRARY.failure(&text(9), "look").one_line();
        assert!(e.contains("/p3") && !e.contains("/p4") && e.contains("and 5 more places"), "{e}");
    }

    #[test]
    fn the_cure_follows_the_cause() {
        assert_eq!(LIBRARY.failure("/x/libx.so has no function f: use X 1.5", "look").hint, LIBRARY.install);
        assert_eq!(LIBRARY.failure("X cannot start its backend", "look").hint, "look");
    }
}

//! The options of one actor, put together from those of the case.

use std::fmt;

/// Options in order; a later one replaces an earlier one of its name. `--env` may come several times.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options(Vec<(String, Option<String>)>);

impl Options {
    /// Options of a line, as in a shell without quotes.
    pub fn parse(line: &str) -> Self {
        let mut options = Self::default();
        let mut words = line.split_whitespace().peekable();
        while let Some(name) = words.next() {
            let value = words.next_if(|w| !w.starts_with("--"));
            options.set(name, value);
        }
        options
    }

    pub fn set(&mut self, name: &str, value: Option<&str>) {
        if name != "--env" {
            self.0.retain(|(n, _)| n != name);
        }
        self.0.push((name.to_owned(), value.map(str::to_owned)));
    }

    /// These, over what is here.
    pub fn with(mut self, line: &str) -> Self {
        for (name, value) in Self::parse(line).0 {
            self.set(&name, value.as_deref());
        }
        self
    }

    /// Those of these names.
    pub fn only(mut self, names: &[&str]) -> Self {
        self.0.retain(|(n, _)| names.contains(&n.as_str()));
        self
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(n, _)| n == name).and_then(|(_, v)| v.as_deref())
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(n, _)| n == name)
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name).and_then(|v| v.parse().ok())
    }

    /// Processes of the role.
    pub fn ranks(&self) -> u64 {
        ["--tp-size", "--pp-size", "--cp-size", "--dp-size"].iter().map(|n| self.number(n).unwrap_or(1)).product()
    }

    /// Rooms asked for.
    pub fn rooms(&self) -> Vec<u64> {
        self.get("--rooms").map(rooms).unwrap_or_default()
    }

    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|(n, v)| std::iter::once(n.as_str()).chain(v.as_deref()))
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().collect::<Vec<_>>().join(" "))
    }
}

/// `100:3` and `7,9`: rooms by their numbers.
pub fn rooms(text: &str) -> Vec<u64> {
    let part = |p: &str| match p.split_once(':') {
        Some((a, n)) => Some((a.parse().ok()?, n.parse().ok()?)),
        None => Some((p.parse().ok()?, 1)),
    };
    text.split(',').filter_map(part).flat_map(|(a, n): (u64, u64)| a..a + n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_options_replace_earlier_ones() {
        let options = Options::parse("--rooms 1:2 --pages 4 --serve --env A=1").with("--pages 8 --env B=2");
        assert_eq!(options.to_string(), "--rooms 1:2 --serve --env A=1 --pages 8 --env B=2");
        assert_eq!((options.number("--pages"), options.has("--serve"), options.ranks()), (Some(8), true, 1));
        assert_eq!(Options::parse("--tp-size 2 --pp-size 2").ranks(), 4);
    }

    #[test]
    fn rooms_are_runs_and_numbers() {
        assert_eq!(rooms("100:3"), [100, 101, 102]);
        assert_eq!(rooms("7,9:2"), [7, 9, 10]);
    }
}

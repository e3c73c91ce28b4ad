//! A line of an actor: one JSON object.

use serde_json::Value;

/// What an actor printed.
#[derive(Debug, Clone, PartialEq)]
pub struct Event(pub Value);

impl Event {
    /// `None`: the line is no event.
    pub fn parse(line: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(line).ok()?;
        value.get("event")?.is_string().then_some(Self(value))
    }

    pub fn kind(&self) -> &str {
        self.text("event")
    }

    /// A text, empty when there is none.
    pub fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn number(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64)
    }

    pub fn count(&self, key: &str) -> Option<u64> {
        self.0.get(key).and_then(Value::as_u64)
    }

    pub fn flag(&self, key: &str) -> Option<bool> {
        self.0.get(key).and_then(Value::as_bool)
    }

    pub fn room(&self) -> Option<u64> {
        self.count("room")
    }

    /// Which rank said it: `tp0 pp1 cp0 dp0`.
    pub fn rank(&self) -> String {
        let part = |k: &str| self.0["rank"].get(k).and_then(Value::as_u64).unwrap_or(0);
        format!("tp{} pp{} cp{} dp{}", part("tp"), part("pp"), part("cp"), part("dp"))
    }

    pub fn dp_rank(&self) -> u64 {
        self.0["rank"].get("dp").and_then(Value::as_u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_objects_with_a_kind() {
        let e = Event::parse(r#"{"event":"room","room":7,"rank":{"tp":1,"dp":2},"verified":true}"#).unwrap();
        assert_eq!((e.kind(), e.room(), e.flag("verified")), ("room", Some(7), Some(true)));
        assert_eq!((e.rank().as_str(), e.dp_rank()), ("tp1 pp0 cp0 dp2", 2));
        assert!(Event::parse("[1]").is_none() && Event::parse("a warning").is_none() && Event::parse("{}").is_none());
    }
}

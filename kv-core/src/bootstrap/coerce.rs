//! Python's `int()`, `bool()` and `str()` as far as SGLang applies them to JSON.

use serde_json::Value;

/// Python's `int(text)`: surrounding white space, one sign, digits with single underscores between them.
pub(crate) fn int_from_str(text: &str) -> Option<i128> {
    let text = text.trim();
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let bytes = digits.as_bytes();
    if bytes.is_empty() || bytes[0] == b'_' || bytes[bytes.len() - 1] == b'_' || digits.contains("__") {
        return None;
    }
    let mut value: i128 = 0;
    for byte in bytes.iter().filter(|b| **b != b'_') {
        if !byte.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(i128::from(byte - b'0'))?;
    }
    Some(if negative { -value } else { value })
}

/// Python's `int(value)`: integers, floats cut towards zero, booleans and numeric strings.
pub(crate) fn int(value: &Value) -> Option<i128> {
    match value {
        Value::Bool(b) => Some(i128::from(*b)),
        Value::String(s) => int_from_str(s),
        Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), _, _) => Some(i128::from(i)),
            (_, Some(u), _) => Some(i128::from(u)),
            // Beyond 2^64 nothing here has a meaning, and `as` would saturate silently.
            (_, _, Some(f)) if f.is_finite() && f.abs() < 1.8e19 => Some(f.trunc() as i128),
            _ => None,
        },
        _ => None,
    }
}

/// Python's `bool(value)`: emptiness and zero are false.
pub(crate) fn truth(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(b) => *b,
        Value::Number(n) => n.as_f64() != Some(0.0),
        Value::String(s) => !s.is_empty(),
        Value::Array(a) => !a.is_empty(),
        Value::Object(o) => !o.is_empty(),
    }
}

/// Python's `str(value)` for the scalars that occur.
pub(crate) fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Bool(true) => Some("True".into()),
        Value::Bool(false) => Some("False".into()),
        Value::Number(n) => Some(n.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn integers_are_read_as_python_reads_them() {
        for (value, want) in [
            (json!(7), Some(7)),
            (json!(" +7\n"), Some(7)),
            (json!("-1"), Some(-1)),
            (json!("1_000"), Some(1000)),
            (json!(3.9), Some(3)),
            (json!(-3.9), Some(-3)),
            (json!(true), Some(1)),
            (json!(u64::MAX), Some(i128::from(u64::MAX))),
            (json!("1__0"), None),
            (json!("_1"), None),
            (json!("1_"), None),
            (json!("0x10"), None),
            (json!("+"), None),
            (json!(""), None),
            (json!("1.5"), None),
            (json!("9".repeat(60)), None),
            (json!(1e300), None),
            (json!(null), None),
            (json!([1]), None),
        ] {
            assert_eq!(int(&value), want, "{value}");
        }
    }

    #[test]
    fn truth_and_text_are_read_as_python_reads_them() {
        for (value, want) in
            [(json!(0), false), (json!(2), true), (json!(""), false), (json!("false"), true), (json!(null), false)]
        {
            assert_eq!(truth(&value), want, "{value}");
        }
        assert_eq!(text(&json!(16)).as_deref(), Some("16"));
        assert_eq!(text(&json!(null)), None);
    }
}

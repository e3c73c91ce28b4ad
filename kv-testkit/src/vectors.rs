//! Golden vectors: loading, walking, and counting that none was left out.
//!
//! The files lie in `kv-testkit/vectors/` and are read when a test runs. A record is named by file and index, since names
//! in the files are not unique; every panic says which.

use std::cell::RefCell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

pub use crate::print::{hex, unhex};

/// The folder of the vectors.
pub fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors")
}

/// Load `vectors/<name>.json`. Panics when it is missing or malformed: a test without its vectors must not pass.
pub fn load(name: &str) -> VectorFile {
    VectorFile::read(&dir().join(format!("{name}.json")))
}

/// One file of vectors.
pub struct VectorFile {
    name: Arc<str>,
    top: Value,
    records: Arc<[Value]>,
    used: RefCell<Vec<bool>>,
}

impl VectorFile {
    /// Read a file from anywhere.
    pub fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self::parse(&path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned()), &text)
    }

    /// A file from its text.
    pub fn parse(name: &str, text: &str) -> Self {
        let mut top: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let records = match top.get_mut("vectors").map(Value::take) {
            Some(Value::Array(records)) => records,
            _ => panic!("{name}: no `vectors` list"),
        };
        let used = RefCell::new(vec![false; records.len()]);
        Self { name: name.into(), top, records: records.into(), used }
    }

    /// How many records it has.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// A further top-level field of the file, as in `staging_allocator`.
    pub fn top(&self, key: &str) -> &Value {
        self.top.get(key).unwrap_or_else(|| panic!("{}: no top-level field {key:?}", self.name))
    }

    /// A list at top level besides `vectors`, as records (not counted).
    pub fn top_records(&self, key: &str) -> Vec<Record> {
        let list = self.top(key).as_array().unwrap_or_else(|| panic!("{}: {key:?} is not a list", self.name));
        let name: Arc<str> = format!("{}.{key}", self.name).into();
        let records = list.iter().cloned().enumerate();
        records.map(|(index, value)| Record { file: name.clone(), index, value }).collect()
    }

    /// The record at `index`, counted as used.
    pub fn get(&self, index: usize) -> Record {
        let value = self.records.get(index).unwrap_or_else(|| panic!("{} has no record {index}", self.name));
        self.used.borrow_mut()[index] = true;
        Record { file: self.name.clone(), index, value: value.clone() }
    }

    /// All records, counted as used.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        (0..self.len()).map(|i| self.get(i))
    }

    /// The records whose text field `key` (`fn`, `message`, `name`) is `value`, counted as used. Panics unless there are
    /// exactly `expected`: a renamed kind must not turn a test into an empty loop.
    pub fn select(&self, key: &str, value: &str, expected: usize) -> Vec<Record> {
        self.select_by(&format!("{key} == {value:?}"), expected, |r| r.value.get(key).is_some_and(|v| v == value))
    }

    /// The records for which `keep` holds; otherwise as [`select`](Self::select).
    pub fn select_by(&self, what: &str, expected: usize, keep: impl Fn(&Record) -> bool) -> Vec<Record> {
        let record = |index| Record { file: self.name.clone(), index, value: self.records[index].clone() };
        let found: Vec<Record> = (0..self.len()).map(record).filter(keep).collect();
        assert_eq!(found.len(), expected, "{}: records with {what}", self.name);
        found.iter().for_each(|r| self.used.borrow_mut()[r.index] = true);
        found
    }

    /// Panics unless the file has `expected` records and every one was handed out.
    pub fn assert_all_used(&self, expected: usize) {
        assert_eq!(self.len(), expected, "{}: number of records", self.name);
        let used = self.used.borrow();
        let left: Vec<usize> = (0..used.len()).filter(|&i| !used[i]).collect();
        assert!(left.is_empty(), "{}: records no test looked at: {left:?}", self.name);
    }
}

/// One record, or one object inside it. Its accessors panic with file, index and field.
#[derive(Clone)]
pub struct Record {
    file: Arc<str>,
    index: usize,
    value: Value,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.file, self.index)?;
        match ["name", "fn"].iter().find_map(|k| self.value.get(k)?.as_str()) {
            Some(name) => write!(f, " {name}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} {}", self.value)
    }
}

impl Record {
    /// Its index in the file.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The JSON itself.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Its `name`, or its `fn`, or nothing.
    pub fn name(&self) -> &str {
        ["name", "fn"].iter().find_map(|k| self.value.get(k)?.as_str()).unwrap_or_default()
    }

    /// Whether the field is there, `null` included.
    pub fn has(&self, key: &str) -> bool {
        self.value.get(key).is_some()
    }

    /// Whether the field is `null` or absent.
    pub fn is_null(&self, key: &str) -> bool {
        self.value.get(key).is_none_or(Value::is_null)
    }

    /// A field that must be there.
    pub fn field(&self, key: &str) -> &Value {
        self.value.get(key).unwrap_or_else(|| panic!("{self}: no field {key:?}"))
    }

    /// An object inside, with the same name for messages.
    pub fn object(&self, key: &str) -> Self {
        let value = self.field(key).clone();
        assert!(value.is_object(), "{self}: {key:?} is not an object");
        Self { file: format!("{}.{key}", self.file).into(), index: self.index, value }
    }

    fn wrong(&self, key: &str, want: &str) -> ! {
        panic!("{self}: {key:?} is {}, not {want}", self.field(key))
    }

    /// A text field.
    pub fn str(&self, key: &str) -> &str {
        self.field(key).as_str().unwrap_or_else(|| self.wrong(key, "text"))
    }

    /// An unsigned field (above `i64::MAX` too).
    pub fn u64(&self, key: &str) -> u64 {
        self.field(key).as_u64().unwrap_or_else(|| self.wrong(key, "a u64"))
    }

    /// A signed field.
    pub fn i64(&self, key: &str) -> i64 {
        self.field(key).as_i64().unwrap_or_else(|| self.wrong(key, "an i64"))
    }

    /// A flag.
    pub fn bool(&self, key: &str) -> bool {
        self.field(key).as_bool().unwrap_or_else(|| self.wrong(key, "a bool"))
    }

    /// A list.
    pub fn list(&self, key: &str) -> &[Value] {
        self.field(key).as_array().unwrap_or_else(|| self.wrong(key, "a list"))
    }

    /// A list of unsigned numbers.
    pub fn u64s(&self, key: &str) -> Vec<u64> {
        let number = |v: &Value| v.as_u64().unwrap_or_else(|| self.wrong(key, "a list of u64"));
        self.list(key).iter().map(number).collect()
    }

    /// A list of signed numbers.
    pub fn i64s(&self, key: &str) -> Vec<i64> {
        let number = |v: &Value| v.as_i64().unwrap_or_else(|| self.wrong(key, "a list of i64"));
        self.list(key).iter().map(number).collect()
    }

    /// A field of hex bytes: text, or `{"hex": text}`.
    pub fn bytes(&self, key: &str) -> Vec<u8> {
        bytes_of(self.field(key)).unwrap_or_else(|e| panic!("{self}: {key:?}: {e}"))
    }

    /// A list of frames, one hex text each.
    pub fn frames(&self, key: &str) -> Vec<Bytes> {
        let frame = |v| bytes_of(v).map_or_else(|e| panic!("{self}: {key:?}: {e}"), Bytes::from);
        self.list(key).iter().map(frame).collect()
    }

    /// Panics with a readable comparison unless the frames are equal.
    pub fn assert_frames<B: AsRef<[u8]>>(&self, key: &str, got: &[B]) {
        let want = self.frames(key);
        for i in 0..want.len().max(got.len()) {
            let (g, w) = (got.get(i).map(AsRef::as_ref), want.get(i).map(AsRef::as_ref));
            assert!(
                g == w,
                "{self}: frame {i} of {}\n  got  {}\n  want {}",
                want.len(),
                g.map_or("(none)".into(), hex),
                w.map_or("(none)".into(), hex)
            );
        }
    }
}

/// Bytes of a JSON value: hex text, or an object with one under `hex`.
pub fn bytes_of(value: &Value) -> Result<Vec<u8>, String> {
    match value.as_str().or_else(|| value.get("hex")?.as_str()) {
        Some(text) => unhex(text),
        None => Err(format!("{value} is not hex")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"source": "test", "extra": [{"a": 1}], "vectors": [
        {"fn": "pack", "input": {"hex": "00ff"}, "frames": ["", "4142"], "room": 18446744073709551615, "x": [-1, 2]},
        {"name": "two", "ok": true, "parsed": null}]}"#;

    #[test]
    fn fields_come_out_typed() {
        let file = VectorFile::parse("t", TEXT);
        let r = file.get(0);
        assert_eq!(r.bytes("input"), [0, 0xff]);
        assert_eq!(r.frames("frames"), [&b""[..], b"AB"]);
        assert_eq!((r.u64("room"), r.i64s("x")), (u64::MAX, vec![-1, 2]));
        assert_eq!(file.get(1).name(), "two");
        assert!(file.get(1).is_null("parsed") && file.get(1).has("parsed") && !r.has("parsed"));
        assert_eq!(file.top_records("extra")[0].u64("a"), 1);
        r.assert_frames("frames", &[&b""[..], b"AB"]);
        file.assert_all_used(2);
    }

    #[test]
    #[should_panic(expected = "records no test looked at: [1]")]
    fn a_record_left_out_is_noticed() {
        let file = VectorFile::parse("t", TEXT);
        let _ = file.select("fn", "pack", 1);
        file.assert_all_used(2);
    }

    #[test]
    #[should_panic(expected = "records with fn == \"pakc\"")]
    fn a_renamed_kind_is_noticed() {
        let _ = VectorFile::parse("t", TEXT).select("fn", "pakc", 1);
    }

    #[test]
    #[should_panic(expected = "t[0] pack: frame 1 of 2")]
    fn a_wrong_frame_is_named() {
        VectorFile::parse("t", TEXT).get(0).assert_frames("frames", &[&b""[..], b"AC"]);
    }
}

//! What a run says at its end: a table for people, one JSON object for programs.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::driver::protocol::Arrived;
use crate::error::{CliError, Result};

/// Collects what rooms report.
pub struct Recorder {
    latency_us: Histogram<u64>,
    fixed_us: Histogram<u64>,
    /// Rooms that ended in Success.
    pub rooms: u64,
    /// Rooms that failed.
    pub failed: u64,
    /// Pages with a wrong byte.
    pub corrupt: u64,
    /// Requests cut to the pool.
    pub clamped: u64,
    /// Tokens decode had in its prefix cache.
    pub prefix_tokens: u64,
    /// Bytes of KV that travelled.
    pub bytes: u64,
    /// Bytes that came in at decode, by the way they came; metadata rows are among them.
    pub arrived: Arrived,
    /// Transfer windows together: fill and verification are outside.
    pub window: Duration,
    /// Filling prefill's pages.
    pub fill: Duration,
    /// Verifying decode's pages.
    pub verify: Duration,
    /// CPU of all prefill ranks in the windows, seconds.
    pub prefill_cpu_s: f64,
    /// CPU of all decode ranks in the windows, seconds.
    pub decode_cpu_s: f64,
    /// First failures and mismatches, in words.
    pub notes: Vec<String>,
}

/// How many causes are kept for the table.
const MAX_NOTES: usize = 5;
/// Latencies are kept up to one hour, with three digits.
const MAX_US: u64 = 3_600_000_000;

impl Recorder {
    /// An empty recorder.
    pub fn new() -> Result<Self> {
        let histogram =
            || Histogram::new_with_bounds(1, MAX_US, 3).map_err(|e| CliError::new(format!("histogram: {e}")));
        Ok(Self {
            latency_us: histogram()?,
            fixed_us: histogram()?,
            rooms: 0,
            failed: 0,
            corrupt: 0,
            clamped: 0,
            prefix_tokens: 0,
            bytes: 0,
            arrived: Arrived::default(),
            window: Duration::ZERO,
            fill: Duration::ZERO,
            verify: Duration::ZERO,
            prefill_cpu_s: 0.0,
            decode_cpu_s: 0.0,
            notes: Vec::new(),
        })
    }

    /// A room ended in Success this long after its `send_metadata`.
    pub fn success(&mut self, latency: Duration, bytes: u64) {
        self.rooms += 1;
        self.bytes += bytes;
        self.latency_us.saturating_record(micros(latency));
    }

    /// A room failed.
    pub fn failure(&mut self, room: u64, reason: &str) {
        self.failed += 1;
        self.note(format!("room {room} failed: {reason}"));
    }

    /// A room without pages ended in Success: what a room costs before its first byte.
    pub fn probe(&mut self, latency: Duration) {
        self.fixed_us.saturating_record(micros(latency));
    }

    /// Keep a cause for the table; only the first few are kept.
    pub fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(note);
        }
    }

    /// Close the run.
    pub fn report(&self, transport: &str, model: &str) -> Report {
        let seconds = self.window.as_secs_f64();
        let per_second = |n: f64| if seconds > 0.0 { n / seconds } else { 0.0 };
        let ms = |q| round(self.latency_us.value_at_quantile(q) as f64 / 1e3, 3);
        Report {
            ok: self.corrupt == 0 && self.failed == 0,
            transport: transport.to_owned(),
            path: path(self.arrived),
            model: model.to_owned(),
            rooms: self.rooms,
            failed: self.failed,
            corrupt: self.corrupt,
            clamped: self.clamped,
            prefix_tokens: self.prefix_tokens,
            bytes: self.bytes,
            seconds: round(seconds, 6),
            gb_per_s: round(per_second(self.bytes as f64 / 1e9), 3),
            rooms_per_s: round(per_second(self.rooms as f64), 2),
            p50_ms: ms(0.5),
            p90_ms: ms(0.9),
            p99_ms: ms(0.99),
            fixed_us: self.fixed_us.value_at_quantile(0.5),
            prefill_cpu_s: round(self.prefill_cpu_s, 3),
            decode_cpu_s: round(self.decode_cpu_s, 3),
        }
    }
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX).max(1)
}

fn path(arrived: Arrived) -> Option<&'static str> {
    match (arrived.copied, arrived.streamed) {
        (0, 0) => None,
        (_, 0) => Some("copy"),
        (0, _) => Some("stream"),
        _ => Some("copy+stream"),
    }
}

fn round(x: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (x * scale).round() / scale
}

/// The keys of [`Report::json`] for people; `kvt replay --help` ends with it.
pub const JSON_HELP: &str = "\
The object that --json prints:
  ok             true when every room ended in Success and every byte was right
  transport      name of the transport
  path           how bytes came to decode: \"copy\" between processes of one host, \"stream\" over connections,
                 \"copy+stream\" both; null where decode ran elsewhere, or nothing moved
  model          name of the model
  rooms          requests that ended in Success
  failed         requests that failed
  corrupt        pages with a wrong byte
  clamped        requests that were cut: to what a pool holds, or to --max-tokens
  prefix_tokens  tokens that decode had in its prefix cache, and that were not sent again
  bytes          bytes of KV cache that travelled
  seconds        time of the transfers, without filling and verifying pages
  gb_per_s       bytes / seconds / 10^9
  rooms_per_s    rooms / seconds
  p50_ms, p90_ms, p99_ms
                 from decode's metadata to Success, milliseconds
  fixed_us       fixed overhead: the median of rooms without pages, microseconds; 0 when not measured
  prefill_cpu_s, decode_cpu_s
                 CPU of all ranks of a side during the transfers, seconds";

/// The figures of a run; its JSON keys are a promise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Every room ended in Success and every byte was right.
    pub ok: bool,
    /// Transport.
    pub transport: String,
    /// How bytes came to decode: `copy` between processes of one host, `stream` over connections, or `copy+stream`.
    /// None where decode ran elsewhere, nothing moved, or the transport does not tell.
    pub path: Option<&'static str>,
    /// Model.
    pub model: String,
    /// Rooms that ended in Success.
    pub rooms: u64,
    /// Rooms that failed.
    pub failed: u64,
    /// Pages with a wrong byte.
    pub corrupt: u64,
    /// Requests that were cut, to the pool or to `--max-tokens`.
    pub clamped: u64,
    /// Tokens decode had in its prefix cache.
    pub prefix_tokens: u64,
    /// Bytes of KV that travelled.
    pub bytes: u64,
    /// Transfer windows together, without fill and verification.
    pub seconds: f64,
    /// `bytes` / `seconds` / 10^9.
    pub gb_per_s: f64,
    /// `rooms` / `seconds`.
    pub rooms_per_s: f64,
    /// Median from `send_metadata` to Success, milliseconds.
    pub p50_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Median of rooms without pages, microseconds; 0 when not measured.
    pub fixed_us: u64,
    /// CPU of all prefill ranks in the windows, seconds.
    pub prefill_cpu_s: f64,
    /// CPU of all decode ranks in the windows, seconds.
    pub decode_cpu_s: f64,
}

impl Report {
    /// One line of JSON.
    pub fn json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| CliError::new(format!("cannot write the report: {e}")))
    }

    /// The table, with what `recorder` knows beyond the figures.
    pub fn table(&self, recorder: &Recorder) -> String {
        let per_gb = |cpu: f64| if self.bytes > 0 { cpu / (self.bytes as f64 / 1e9) } else { 0.0 };
        let rows = [
            ("model", self.model.clone()),
            ("transport", self.path.map_or(self.transport.clone(), |p| format!("{} ({p})", self.transport))),
            ("requests", format!("{} done, {} failed, {} cut (clamped)", self.rooms, self.failed, self.clamped)),
            ("prefix cache", format!("{} tokens not sent again", self.prefix_tokens)),
            ("bytes", format!("{} ({:.2} GB)", self.bytes, self.bytes as f64 / 1e9)),
            ("transfer time", format!("{:.3} s", self.seconds)),
            ("rate", format!("{:.3} GB/s, {:.1} rooms/s", self.gb_per_s, self.rooms_per_s)),
            ("latency", format!("p50 {:.2} ms, p90 {:.2} ms, p99 {:.2} ms", self.p50_ms, self.p90_ms, self.p99_ms)),
            (
                "fixed overhead",
                if self.fixed_us > 0 {
                    format!("{} us a room: median of rooms without pages", self.fixed_us)
                } else {
                    "not measured".into()
                },
            ),
            (
                "CPU",
                format!(
                    "prefill {:.2} s ({:.2} s/GB), decode {:.2} s ({:.2} s/GB)",
                    self.prefill_cpu_s,
                    per_gb(self.prefill_cpu_s),
                    self.decode_cpu_s,
                    per_gb(self.decode_cpu_s)
                ),
            ),
            (
                "outside the clock",
                format!("fill {:.2} s, verify {:.2} s", recorder.fill.as_secs_f64(), recorder.verify.as_secs_f64()),
            ),
            ("corrupt pages", self.corrupt.to_string()),
            ("verdict", if self.ok { "every byte verified".into() } else { "FAILED".to_owned() }),
        ];
        let width = rows.iter().map(|(k, _)| k.len()).max().unwrap_or(0);
        let mut out: String = rows.iter().map(|(k, v)| format!("{k:width$}  {v}\n")).collect();
        for note in &recorder.notes {
            out.push_str(&format!("{:width$}  {note}\n", "cause"));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys that scripts read, in this order.
    const KEYS: [&str; 19] = [
        "ok",
        "transport",
        "path",
        "model",
        "rooms",
        "failed",
        "corrupt",
        "clamped",
        "prefix_tokens",
        "bytes",
        "seconds",
        "gb_per_s",
        "rooms_per_s",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "fixed_us",
        "prefill_cpu_s",
        "decode_cpu_s",
    ];

    fn recorder() -> Recorder {
        let mut r = Recorder::new().unwrap();
        for ms in 1..=100 {
            r.success(Duration::from_millis(ms), 10_000_000);
        }
        r.probe(Duration::from_micros(180));
        r.window = Duration::from_secs(2);
        r
    }

    #[test]
    fn json_has_exactly_the_promised_keys() {
        let json = recorder().report("tcp", "m").json().unwrap();
        let value: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&json).unwrap();
        let mut keys: Vec<_> = value.keys().map(String::as_str).collect();
        let mut want = KEYS.to_vec();
        keys.sort_unstable();
        want.sort_unstable();
        assert_eq!(keys, want);
        for key in KEYS {
            let words = |line: &str| line.split([' ', ',']).any(|word| word == key);
            assert!(JSON_HELP.lines().any(words), "{key} is not explained");
        }
        assert!(!json.contains('\n'));
    }

    #[test]
    fn figures_follow_from_what_was_recorded() {
        let report = recorder().report("tcp", "m");
        assert_eq!((report.ok, report.rooms, report.bytes), (true, 100, 1_000_000_000));
        assert_eq!((report.seconds, report.gb_per_s, report.rooms_per_s), (2.0, 0.5, 50.0));
        assert!((report.p50_ms - 50.0).abs() < 0.1 && (report.p99_ms - 99.0).abs() < 0.1, "{report:?}");
        assert_eq!(report.fixed_us, 180);
    }

    #[test]
    fn ok_only_without_failures_and_corrupt_pages() {
        let mut r = recorder();
        r.failure(7, "peer lost");
        assert!(!r.report("tcp", "m").ok);
        assert!(r.report("tcp", "m").table(&r).contains("room 7 failed: peer lost"));
        let mut r = recorder();
        r.corrupt = 1;
        assert!(!r.report("tcp", "m").ok);
        assert!(r.report("tcp", "m").table(&r).contains("FAILED"));
    }

    #[test]
    fn an_empty_run_divides_by_nothing() {
        let report = Recorder::new().unwrap().report("tcp", "m");
        assert_eq!((report.gb_per_s, report.p99_ms, report.fixed_us), (0.0, 0.0, 0));
    }
}

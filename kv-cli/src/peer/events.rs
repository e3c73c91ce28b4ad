//! What a peer says: one JSON object a line on standard output.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::error::Result;
use crate::out;

/// Say `event`, with its fields (an object) and the time.
pub fn emit(event: &str, fields: Value) -> Result<()> {
    let mut line = json!({ "event": event, "t": unix_now() });
    if let (Some(line), Value::Object(fields)) = (line.as_object_mut(), fields) {
        line.extend(fields);
    }
    out::line(line)
}

/// Seconds since 1970.
pub fn unix_now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1e6).round() / 1e6
}

/// Milliseconds, as events have them.
pub fn ms(d: Duration) -> f64 {
    (d.as_secs_f64() * 1e6).round() / 1e3
}

/// User and system time of this process so far, seconds.
pub fn cpu_now() -> f64 {
    // SAFETY: an all-zero rusage is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one rusage; cannot fail with these arguments.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Busy CPU seconds of the whole machine so far; 0 where it does not tell.
pub fn machine_busy() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let numbers = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).take(8);
    let v: Vec<f64> = numbers.filter_map(|n| n.parse().ok()).collect();
    // SAFETY: a constant of the system.
    let tick = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as f64;
    if v.len() < 5 { 0.0 } else { (v.iter().sum::<f64>() - v[3] - v[4]) / tick }
}

/// The measured window: from the first room's start to the last room's end.
#[derive(Debug, Default)]
pub struct Window {
    from: Option<(std::time::Instant, f64, f64)>,
    to: Option<(std::time::Instant, f64, f64)>,
    latencies: Vec<Duration>,
}

impl Window {
    /// A measured room starts.
    pub fn start(&mut self) {
        self.from.get_or_insert_with(|| (std::time::Instant::now(), cpu_now(), machine_busy()));
    }

    /// A measured room ended; its latency, if it went well.
    pub fn end(&mut self, latency: Option<Duration>) {
        self.to = Some((std::time::Instant::now(), cpu_now(), 0.0));
        self.latencies.extend(latency);
    }

    /// The last room has ended.
    pub fn close(&mut self) {
        if let Some(to) = &mut self.to {
            to.2 = machine_busy();
        }
    }

    /// Keys of a summary. `room_bytes`: KV of one room at this rank.
    pub fn summary(&self, room_bytes: u64) -> Value {
        let (window, cpu, machine) = match (&self.from, &self.to) {
            (Some(a), Some(b)) => (b.0.duration_since(a.0).as_secs_f64(), b.1 - a.1, b.2 - a.2),
            _ => (0.0, 0.0, 0.0),
        };
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let at = |p: f64| sorted.get(((p * sorted.len() as f64) as usize).min(sorted.len().saturating_sub(1)));
        let per_s = |n: f64| (window > 0.0).then(|| n / window);
        let bytes = room_bytes * sorted.len() as u64;
        json!({
            "measured": sorted.len(), "window_s": window, "cpu_s": cpu, "machine_busy_s": machine, "bytes": bytes,
            "rooms_per_s": per_s(sorted.len() as f64), "GB_per_s": per_s(bytes as f64 / 1e9),
            "p50_ms": at(0.5).map(|d| ms(*d)), "p99_ms": at(0.99).map(|d| ms(*d)),
            "min_ms": at(0.0).map(|d| ms(*d)), "max_ms": at(1.0).map(|d| ms(*d)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_without_rooms_has_no_rates() {
        let s = Window::default().summary(10);
        assert_eq!((&s["measured"], &s["rooms_per_s"], &s["p50_ms"]), (&json!(0), &Value::Null, &Value::Null));
    }

    #[test]
    fn percentiles_are_of_the_sorted_latencies() {
        let mut w = Window::default();
        w.start();
        (1..=100).rev().for_each(|i| w.end(Some(Duration::from_millis(i))));
        let s = w.summary(1000);
        assert_eq!((s["p50_ms"].as_f64(), s["p99_ms"].as_f64()), (Some(51.0), Some(100.0)));
        assert_eq!((s["bytes"].as_u64(), s["min_ms"].as_f64()), (Some(100_000), Some(1.0)));
    }
}

//! What one run of a pair measured.

use std::fmt;

use super::super::event::Event;
use super::super::play::Played;
use crate::sh::Result;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub rooms_per_s: f64,
    pub gb_per_s: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub prefill_cpu_s: f64,
    pub decode_cpu_s: f64,
    /// Payload of the window.
    pub gb: f64,
    pub rooms: f64,
    /// Share of the machine that other programs had, 0 to 1.
    pub others: f64,
}

impl Sample {
    /// From the summaries of both sides.
    pub fn of(played: &Played, rooms: u64, others: f64) -> Result<Self> {
        let summary = |role: &str| {
            let acted = played.actors.iter().find(|a| a.who.role() == role);
            acted.and_then(|a| a.of("summary").next()).ok_or_else(|| format!("{role} gave no summary"))
        };
        let (prefill, decode) = (summary("prefill")?, summary("decode")?);
        let number = |e: &Event, key: &str| e.number(key).ok_or_else(|| format!("a summary without {key}: {}", e.0));
        Ok(Self {
            rooms_per_s: number(decode, "rooms_per_s")?,
            gb_per_s: number(decode, "GB_per_s")?,
            p50_ms: number(decode, "p50_ms")?,
            p99_ms: number(decode, "p99_ms")?,
            prefill_cpu_s: number(prefill, "cpu_s")?,
            decode_cpu_s: number(decode, "cpu_s")?,
            gb: number(decode, "bytes")? / 1e9,
            rooms: rooms as f64,
            others,
        })
    }

    pub fn prefill_cpu_per_gb(&self) -> f64 {
        self.prefill_cpu_s / self.gb
    }

    pub fn decode_cpu_per_gb(&self) -> f64 {
        self.decode_cpu_s / self.gb
    }

    pub fn prefill_us_a_room(&self) -> f64 {
        self.prefill_cpu_s / self.rooms * 1e6
    }

    pub fn decode_us_a_room(&self) -> f64 {
        self.decode_cpu_s / self.rooms * 1e6
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.1} rooms/s, {:.2} GB/s, p50 {:.1} ms, p99 {:.1} ms, CPU {:.2} + {:.2} s, others {:.0} %",
            self.rooms_per_s,
            self.gb_per_s,
            self.p50_ms,
            self.p99_ms,
            self.prefill_cpu_s,
            self.decode_cpu_s,
            self.others * 100.0
        )
    }
}

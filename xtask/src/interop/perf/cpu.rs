//! CPU seconds of the machine and of a run, from `/proc`: what is left over, other programs used.

use std::fs;

/// Ticks a second of `/proc`: the kernel's interface has no other.
const TICKS: f64 = 100.0;

/// CPU seconds so far.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    machine: f64,
    ours: f64,
}

impl Cpu {
    /// Of the machine, and of this process, the SGLang server and the children that both waited for.
    pub fn now(server: Option<u32>) -> Self {
        let machine = fs::read_to_string("/proc/stat").ok().and_then(|t| busy(&t)).unwrap_or(0.0);
        let of = |pid: &str| {
            fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|t| with_children(&t)).unwrap_or(0.0)
        };
        Self { machine, ours: of("self") + server.map_or(0.0, |p| of(&p.to_string())) }
    }

    /// The share of the machine that others had since then, over so many seconds.
    pub fn others_since(self, then: Self, seconds: f64) -> f64 {
        let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        let others = (self.machine - then.machine) - (self.ours - then.ours);
        (others / (seconds * cores)).max(0.0)
    }
}

/// `cpu  user nice system idle iowait irq softirq steal ...`
fn busy(text: &str) -> Option<f64> {
    let numbers: Vec<f64> =
        text.lines().next()?.split_whitespace().skip(1).take(8).filter_map(|w| w.parse().ok()).collect();
    let (all, idle) = (numbers.iter().sum::<f64>(), numbers.get(3)? + numbers.get(4)?);
    Some((all - idle) / TICKS)
}

/// User and system time of a process and of the children it waited for: fields 14 to 17.
fn with_children(text: &str) -> Option<f64> {
    // The name may have spaces and parentheses.
    let (_, rest) = text.rsplit_once(')')?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let times = words.get(11..15)?;
    Some(times.iter().filter_map(|w| w.parse::<f64>().ok()).sum::<f64>() / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_proc_has_them() {
        assert_eq!(busy("cpu  100 0 50 900 50 0 0 50 0 0\ncpu0 1\n"), Some(2.0));
        let stat = "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 100 200 300 400 20 0";
        assert_eq!(with_children(stat), Some(10.0));
        assert_eq!(with_children("x"), None);
    }

    #[test]
    fn what_is_not_ours_is_others() {
        let then = Cpu { machine: 10.0, ours: 1.0 };
        let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        let share = Cpu { machine: 14.0, ours: 3.0 }.others_since(then, 2.0);
        assert!((share - 1.0 / cores).abs() < 1e-9);
    }
}

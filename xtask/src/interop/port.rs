//! Ports for bootstrap servers: below those that the kernel hands out, so that no socket of a peer takes one meanwhile.

use std::net::{IpAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::sh::Result;

const FIRST: u16 = 21_000;
const COUNT: u16 = 10_000;
static NEXT: AtomicU16 = AtomicU16::new(0);

/// A port that nobody has now, and that this run gives nobody else.
pub fn free(host: IpAddr) -> Result<u16> {
    // Runs side by side start at different places.
    let start = std::process::id().wrapping_mul(97) % u32::from(COUNT);
    for _ in 0..COUNT {
        let n = u32::from(NEXT.fetch_add(1, Ordering::Relaxed)) + start;
        let port = FIRST + u16::try_from(n % u32::from(COUNT)).unwrap_or(0);
        if TcpListener::bind((host, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(format!("no free port at {host} from {FIRST} on"))
}

/// Why nothing can listen at an address.
pub fn missing(host: IpAddr) -> Option<String> {
    TcpListener::bind((host, 0)).err().map(|e| format!("this machine has no {host}: {e}"))
}

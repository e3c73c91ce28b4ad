//! What the network gives: addresses, ports, buffers, namespaces.

use std::fs;
use std::net::{IpAddr, TcpListener};

use super::{Check, Status, probe};

/// The registry's port, as `kvt bootstrap` takes it.
const REGISTRY_PORT: u16 = 8998;

pub fn listens(name: &'static str, addr: &str, fix: &str) -> Check {
    match TcpListener::bind(addr) {
        Ok(_) => Check::new(name, Status::Ok, "can listen", ""),
        Err(e) => Check::new(name, Status::No, format!("cannot listen on {addr}: {e}"), fix),
    }
}

pub fn registry_port() -> Check {
    let name = "tcp: registry port 8998";
    match TcpListener::bind(("0.0.0.0", REGISTRY_PORT)) {
        Ok(_) => Check::new(name, Status::Ok, "free", ""),
        Err(e) => Check::new(
            name,
            Status::Warn,
            format!("not free: {e}"),
            "kvt bootstrap --port 0 takes another; `ss -ltnp sport = :8998` names who has it",
        ),
    }
}

/// Addresses other machines may reach this one at.
#[cfg_attr(not(feature = "tcp"), allow(dead_code))]
pub fn addresses(all: &[IpAddr]) -> Check {
    let name = "tcp: to other machines";
    let mut outer: Vec<_> = all.iter().filter(|ip| !ip.is_loopback()).map(ToString::to_string).collect();
    outer.sort();
    outer.dedup();
    if outer.is_empty() {
        let fix = "ip addr add ADDRESS/PREFIX dev INTERFACE";
        return Check::new(name, Status::Warn, "only loopback addresses: this machine alone", fix);
    }
    Check::new(name, Status::Ok, format!("streams; give --host one of {}", outer.join(", ")), "")
}

/// What the transport asks the kernel for on each data connection.
const WANTED_BUFFER: u64 = 512 << 10;

pub fn buffers() -> Check {
    let name = "tcp: socket buffers";
    let read = |which: &str| -> Option<u64> {
        fs::read_to_string(format!("/proc/sys/net/core/{which}_max")).ok()?.trim().parse().ok()
    };
    match (read("rmem"), read("wmem")) {
        (Some(r), Some(w)) => buffers_check(name, r, w),
        // Namespaces other than the first do not show them on older kernels.
        _ => Check::new(name, Status::Warn, "net.core.rmem_max and wmem_max cannot be read here", ""),
    }
}

fn buffers_check(name: &'static str, rmem: u64, wmem: u64) -> Check {
    let detail = format!("up to {} KiB in, {} KiB out", rmem >> 10, wmem >> 10);
    if rmem.min(wmem) < WANTED_BUFFER {
        let fix = format!("sysctl -w net.core.rmem_max={WANTED_BUFFER} net.core.wmem_max={WANTED_BUFFER}");
        return Check::new(name, Status::Warn, format!("{detail}: streams to other hosts want 512 KiB"), fix);
    }
    Check::new(name, Status::Ok, detail, "")
}

/// The test of two machines makes network namespaces.
pub fn namespaces() -> Check {
    let name = "tests: two machines";
    let iproute =
        std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join("ip").is_file()));
    match probe::network_namespace() {
        Err(why) => Check::new(
            name,
            Status::Warn,
            format!("network namespaces are not permitted ({why}): the test skips itself"),
            "run the tests as root; in a container: --cap-add=SYS_ADMIN --cap-add=NET_ADMIN",
        ),
        Ok(()) if !iproute => Check::new(
            name,
            Status::Warn,
            "the program `ip` is not here: the test skips itself",
            "apt-get install iproute2",
        ),
        Ok(()) => Check::new(name, Status::Ok, "network namespaces can be made", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_fails_names_the_cure() {
        let check = listens("x", "203.0.113.1:0", "do this");
        assert_eq!((check.status, check.fix.as_str()), (Status::No, "do this"));
        assert_eq!(listens("x", "127.0.0.1:0", "").status, Status::Ok);
        assert_eq!(addresses(&["127.0.0.1".parse().unwrap()]).status, Status::Warn);
        let check = addresses(&["::1".parse().unwrap(), "10.0.0.7".parse().unwrap()]);
        assert!(check.status == Status::Ok && check.detail.contains("10.0.0.7"), "{check:?}");
        let check = buffers_check("b", 212_992, 4 << 20);
        assert!(check.status == Status::Warn && check.fix.contains("net.core.rmem_max=524288"), "{check:?}");
        assert_eq!(buffers_check("b", 4 << 20, 4 << 20).status, Status::Ok);
    }
}

//! Hosts and URLs (protocol 2.5): wildcard hosts, IPv6 brackets and zones, multi-node addresses. Nothing is resolved
//! here, so that names with only an IPv6 address work as well.

use std::net::Ipv6Addr;

/// A text that is no `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not host:port (bracket IPv6 hosts: [::1]:8998)")]
pub struct AddressError {
    /// What was given.
    pub text: String,
}

fn is_ipv6(host: &str) -> bool {
    host.split('%').next().is_some_and(|h| h.parse::<Ipv6Addr>().is_ok())
}

/// `host:port` or `[v6]:port` -> (unbracketed host, port).
///
/// # Errors
/// [`AddressError`]: no port, a bad port, an empty host, or an IPv6 host without brackets.
pub fn split_host_port(text: &str) -> Result<(&str, u16), AddressError> {
    let bad = || AddressError { text: text.to_owned() };
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let port: u16 = port.parse().map_err(|_| bad())?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']').filter(|h| is_ipv6(h)).ok_or_else(bad)?,
        None => host,
    };
    let plain = host.chars().all(|c| !c.is_whitespace() && !c.is_control() && !"/?#@\\".contains(c));
    if host.is_empty() || !plain || (host.contains(':') && !text.starts_with('[')) {
        return Err(bad());
    }
    Ok((host, port))
}

/// `host:port` with IPv6 hosts bracketed; brackets already there are kept.
pub fn join_host_port(host: &str, port: u16) -> String {
    let host = unbracketed(host);
    if is_ipv6(host) { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The host without its brackets.
pub fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}

/// The address a prefill rank registers at.
///
/// The host is `dist_init_addr`'s when that is set (several nodes share the first one's server), else the server's own
/// listen host; a wildcard becomes the loopback address of the same family.
///
/// # Errors
/// [`AddressError`] when `dist_init_addr` is no `host:port`.
pub fn registration_addr(host: &str, dist_init_addr: Option<&str>, port: u16) -> Result<String, AddressError> {
    let host = match dist_init_addr {
        Some(addr) => split_host_port(addr)?.0,
        None => match unbracketed(host) {
            "0.0.0.0" => "127.0.0.1",
            "::" => "::1",
            "" => return Err(AddressError { text: host.to_owned() }),
            host => host,
        },
    };
    Ok(join_host_port(host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cat_f66_every_form_of_host_becomes_the_right_address() {
        for (host, dist, want) in [
            ("0.0.0.0", None, "127.0.0.1:8998"),
            ("::", None, "[::1]:8998"),
            ("[::]", None, "[::1]:8998"),
            ("fd00::7", None, "[fd00::7]:8998"),
            ("[fd00::7]", None, "[fd00::7]:8998"),
            ("fe80::1%eth0", None, "[fe80::1%eth0]:8998"),
            ("prefill-0.svc", None, "prefill-0.svc:8998"),
            ("0.0.0.0", Some("10.8.8.8:5000"), "10.8.8.8:8998"),
            ("::", Some("[fd00::1]:5000"), "[fd00::1]:8998"),
            ("10.9.9.9", Some("head.svc:5000"), "head.svc:8998"),
        ] {
            assert_eq!(registration_addr(host, dist, 8998).as_deref(), Ok(want), "{host} {dist:?}");
        }
        for bad in ["fd00::1", "head", "head:", "head:99999", ":80", "[head]:80", "[::1]", "a b:80", "a/b:80"] {
            assert_eq!(registration_addr("h", Some(bad), 1), Err(AddressError { text: bad.into() }), "{bad}");
        }
    }

    #[test]
    fn split_is_the_inverse_of_join() {
        for (host, port) in [("10.0.0.7", 1), ("::1", 65535), ("fe80::1%eth0", 80), ("p.example", 8998)] {
            assert_eq!(split_host_port(&join_host_port(host, port)), Ok((host, port)));
        }
    }
}

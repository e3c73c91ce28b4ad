//! The addresses of a network interface: getifaddrs(3), which std does not offer.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// The IPv4 and IPv6 addresses of the interface called `name`; none when there is no such interface.
pub(super) fn addresses(name: &str) -> Vec<IpAddr> {
    let mut head: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: on success `head` is set to a list that is ours until freeifaddrs.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = head.cast_const();
    // SAFETY: each node is null or valid until freeifaddrs below.
    while let Some(node) = unsafe { next.as_ref() } {
        next = node.ifa_next.cast_const();
        // SAFETY: ifa_name is a C string of the same lifetime.
        if unsafe { CStr::from_ptr(node.ifa_name) }.to_bytes() == name.as_bytes() {
            // SAFETY: ifa_addr is null or a socket address of the size its family says.
            found.extend(unsafe { ip(node.ifa_addr) });
        }
    }
    // SAFETY: the list came from getifaddrs and nothing of it is kept.
    unsafe { libc::freeifaddrs(head) };
    found
}

/// # Safety
/// `address` is null or points to a socket address as large as its family needs.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: as promised by the caller. Read unaligned: the type says nothing about the allocation's alignment.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let v4 = ptr::read_unaligned(address.cast::<libc::sockaddr_in>());
                Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
            }
            libc::AF_INET6 => {
                let v6 = ptr::read_unaligned(address.cast::<libc::sockaddr_in6>());
                Some(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)))
            }
            _ => None,
        }
    }
}

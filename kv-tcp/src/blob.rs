//! The metadata blob: what a peer needs to write to us. Opaque to everyone else, versioned, little-endian.

use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;

use crate::codec::{Malformed, Put, Reader};
use kv_core::host::HostIdentity;

/// Version of the blob and of the wire; both sides must have the same.
pub(crate) const VERSION: u16 = 1;
const MAGIC: &[u8; 4] = b"KVTM";
/// Longest name of a transport, bytes.
pub(crate) const MAX_NAME: usize = 255;

/// A 128-bit random secret.
#[derive(Clone, Copy)]
pub(crate) struct Key(pub [u8; 16]);

impl Key {
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(Self(bytes))
    }

    /// Equality in time that does not depend on where they differ.
    pub fn matches(&self, other: &Self) -> bool {
        std::hint::black_box(self.0.iter().zip(&other.0).fold(0, |acc, (a, b)| acc | (a ^ b))) == 0
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// A region a peer registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteRegion {
    pub id: u32,
    pub addr: u64,
    pub len: u64,
    pub key: Key,
}

const REGION_LEN: usize = 36;

/// Everything a peer publishes.
#[derive(Clone, Debug)]
pub(crate) struct Blob {
    pub name: String,
    /// Presented in every hello: connections of strangers end there.
    pub admission: Key,
    pub host: HostIdentity,
    pub addresses: Vec<SocketAddr>,
    pub regions: Vec<RemoteRegion>,
}

impl Blob {
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(128 + self.regions.len() * REGION_LEN);
        out.put(MAGIC);
        out.put_u16(VERSION);
        out.put_text(&self.name, MAX_NAME);
        out.put(&self.admission.0);
        out.put(&self.host.to_bytes());
        out.put_u32(self.addresses.len() as u32);
        for a in &self.addresses {
            let ip = match a.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            out.put(&ip.octets());
            out.put_u16(a.port());
        }
        out.put_u32(self.regions.len() as u32);
        for r in &self.regions {
            out.put_u32(r.id);
            out.put_u64(r.addr);
            out.put_u64(r.len);
            out.put(&r.key.0);
        }
        out.into()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes);
        if &r.array::<4>()? != MAGIC {
            return Err(Malformed("not a metadata blob of this transport"));
        }
        if r.u16()? != VERSION {
            return Err(Malformed("metadata blob of another version"));
        }
        let name = r.text(MAX_NAME)?.to_owned();
        if name.is_empty() {
            return Err(Malformed("no name"));
        }
        let admission = Key(r.array()?);
        let host = HostIdentity::from_bytes(r.array()?);
        let mut addresses = Vec::new();
        for _ in 0..r.count(18)? {
            let ip = std::net::Ipv6Addr::from(r.array::<16>()?).to_canonical();
            addresses.push(SocketAddr::new(ip, r.u16()?));
        }
        let mut regions = Vec::new();
        for _ in 0..r.count(REGION_LEN)? {
            let region = RemoteRegion { id: r.u32()?, addr: r.u64()?, len: r.u64()?, key: Key(r.array()?) };
            if region.len == 0 || region.addr.checked_add(region.len).is_none() {
                return Err(Malformed("region outside the address space"));
            }
            regions.push(region);
        }
        r.end()?;
        Ok(Self { name, admission, host, addresses, regions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blob() -> Blob {
        Blob {
            name: "d-1".into(),
            admission: Key([3; 16]),
            host: HostIdentity { boot_id: [1; 16], pid_ns: 2, pid: 3, start: 4, uid: 5 },
            addresses: vec!["10.0.0.1:80".parse().unwrap(), "[fd00::1]:81".parse().unwrap()],
            regions: vec![RemoteRegion { id: 0, addr: 4096, len: 8192, key: Key([9; 16]) }],
        }
    }

    #[test]
    fn round_trip() {
        let b = blob();
        let d = Blob::decode(&b.encode()).unwrap();
        assert_eq!((d.name, d.host, d.addresses), (b.name, b.host, b.addresses));
        assert_eq!((d.regions[0].addr, d.regions[0].len, d.regions[0].key.0), (4096, 8192, [9; 16]));
    }

    #[test]
    fn every_truncation_is_refused() {
        let whole = blob().encode();
        for n in 0..whole.len() {
            assert!(Blob::decode(&whole[..n]).is_err(), "{n} bytes");
        }
    }

    #[test]
    fn a_region_past_the_end_of_memory_is_refused() {
        let mut b = blob();
        b.regions[0].addr = u64::MAX - 10;
        assert_eq!(Blob::decode(&b.encode()).unwrap_err(), Malformed("region outside the address space"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400), at in 0usize..100, v: u8) {
            let _ = Blob::decode(&bytes);
            let mut near = blob().encode().to_vec();
            let at = at % near.len();
            near[at] = v;
            let _ = Blob::decode(&near);
        }
    }
}

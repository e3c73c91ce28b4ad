//! What an engine says of itself: the descriptor.
//!
//! The library throws when a member of a peer's descriptor has another type than it expects, and that ends its process
//! (0.3.13.post1). So what it would read is looked at strictly here: a descriptor that is taken is one it can read.

use serde_json::{Map, Value, json};

/// From this version of the data port's wire on a target acknowledges writes.
pub const ACKNOWLEDGES: i64 = 2;

/// A block of memory that an engine registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Buffer {
    /// First byte's address in the engine's process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// What an engine says of itself, as far as it matters to who writes there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Its session id, `host:port`.
    pub name: String,
    /// `tcp` or `rdma`.
    pub protocol: String,
    /// Its data port; 0 where it speaks something else than TCP.
    pub data_port: u16,
    /// Host of its data port; `None`: that of its session id.
    pub data_host: Option<String>,
    /// Version of its data port's wire. From 2 on writes are acknowledged.
    pub version: i64,
    /// By address.
    buffers: Vec<Buffer>,
}

/// Host and port of a session id: `10.0.0.7:15592`, `[::1]:15592`.
pub fn session(name: &str) -> Option<(&str, u16)> {
    let (host, port) = name.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|p| *p != 0)?;
    // The name goes to the library as it is: nothing in it that a host's name does not have.
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
    (!host.is_empty() && host.chars().all(plain)).then_some((host, port))
}

impl Descriptor {
    /// One over TCP.
    pub fn tcp(
        name: &str,
        host: Option<&str>,
        port: u16,
        version: i64,
        buffers: impl IntoIterator<Item = Buffer>,
    ) -> Self {
        let mut buffers: Vec<Buffer> = buffers.into_iter().collect();
        buffers.sort_unstable();
        let data_host = host.map(str::to_owned);
        Self { name: name.into(), protocol: "tcp".into(), data_port: port, data_host, version, buffers }
    }

    /// What was registered, by address.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Whether writes are acknowledged.
    pub fn acknowledges(&self) -> bool {
        self.version >= ACKNOWLEDGES
    }

    /// Whether one registered buffer holds all of it, as the engine will ask.
    pub fn holds(&self, addr: u64, len: u64) -> bool {
        let Some(end) = addr.checked_add(len) else { return false };
        let inside = |b: &Buffer| b.addr <= addr && end - b.addr <= b.len;
        let after = self.buffers.partition_point(|b| b.addr <= addr);
        // The nearest first; another one only where buffers overlap.
        after.checked_sub(1).is_some_and(|i| inside(&self.buffers[i])) || self.buffers[..after].iter().any(inside)
    }

    /// First byte of what was registered.
    pub fn first(&self) -> Option<u64> {
        self.buffers.first().map(|b| b.addr)
    }

    /// Whether the same process may have said both, as far as they tell: registrations come and go, ports do not.
    pub fn may_be(&self, other: &Self) -> bool {
        let shares = || self.buffers.iter().any(|b| other.buffers.binary_search(b).is_ok());
        self.protocol == other.protocol
            && self.data_port == other.data_port
            && (self.buffers.is_empty() || other.buffers.is_empty() || shares())
    }

    /// Its JSON, with the members that 0.3.13.post1 has and needs.
    pub fn to_json(&self) -> Value {
        let buffer = |b: &Buffer| json!({"addr": b.addr, "length": b.len, "name": self.name});
        let mut out = json!({
            "name": self.name, "protocol": self.protocol, "rdma_server_name": "", "timestamp": "",
            "tcp_data_port": self.data_port, "tcp_proto_version": self.version,
            "buffers": self.buffers.iter().map(buffer).collect::<Vec<_>>(),
        });
        if let (Some(host), Some(members)) = (&self.data_host, out.as_object_mut()) {
            members.insert("tcp_data_host".into(), json!(host));
        }
        out
    }

    /// Read what the engine behind `session` says of itself.
    ///
    /// # Errors
    /// It is no JSON, or as for [`check`](Self::check).
    pub fn parse(text: &[u8], session: &str) -> Result<Self, String> {
        let value = serde_json::from_slice(text).map_err(|e| format!("its descriptor is no JSON: {e}"))?;
        Self::check(&value, session)
    }

    /// The same of JSON that was read already.
    ///
    /// # Errors
    /// The member that the library could not read, or that makes writing there impossible, and what it holds.
    pub fn check(value: &Value, session: &str) -> Result<Self, String> {
        let top = Members::of(value, "its descriptor")?;
        for name in ["timestamp", "rdma_server_name"] {
            top.text(name)?;
        }
        let data_host = top.text("tcp_data_host")?.filter(|h| !h.is_empty()).map(str::to_owned);
        top.number("metadata_version")?;
        let protocol = top.text("protocol")?.ok_or_else(|| top.wrong("protocol", "text"))?;
        let data_port = top.number("tcp_data_port")?.unwrap_or(0);
        let version = top.number("tcp_proto_version")?.unwrap_or(1);
        match protocol {
            "tcp" if !(1..=0xffff).contains(&data_port) => return Err(top.wrong("tcp_data_port", "a port")),
            "tcp" => {}
            "rdma" => check_rdma(&top)?,
            other => return Err(format!("its protocol is {other:?}; only tcp and rdma are known here")),
        }
        let name = top.text("name")?.unwrap_or_default();
        if name != session {
            // The library would not find it again to ask it anew.
            return Err(format!("it calls itself {name:?}"));
        }
        let mut buffers = Vec::new();
        for buffer in top.list("buffers")? {
            let buffer = Members::of(buffer, "a buffer of its descriptor")?;
            if buffer.text("name")?.is_none_or(str::is_empty) {
                return Err(buffer.wrong("name", "text"));
            }
            buffer.keys("rkey")?;
            buffer.keys("lkey")?;
            buffers.push(Buffer { addr: buffer.size("addr")?, len: buffer.size("length")? });
        }
        buffers.sort_unstable();
        let data_port = u16::try_from(data_port).unwrap_or(0);
        Ok(Self { name: name.into(), protocol: protocol.into(), data_port, data_host, version, buffers })
    }
}

/// A member's type as the library wants it, where it is there; null stands for nothing with it.
struct Members<'a>(&'a Map<String, Value>, &'static str);

impl<'a> Members<'a> {
    fn of(value: &'a Value, what: &'static str) -> Result<Self, String> {
        value.as_object().map(|m| Self(m, what)).ok_or_else(|| format!("{what} is no object"))
    }

    fn wrong(&self, name: &str, wanted: &str) -> String {
        let found = self.0.get(name).map_or("nothing".into(), |v| v.to_string().chars().take(40).collect::<String>());
        format!("{}: {name} is {found}, not {wanted}", self.1)
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        match self.0.get(name) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| self.wrong(name, "text")),
        }
    }

    fn number(&self, name: &str) -> Result<Option<i64>, String> {
        match self.0.get(name) {
            None => Ok(None),
            // As an `int` there.
            Some(v) => v
                .as_i64()
                .filter(|n| i32::try_from(*n).is_ok())
                .map(Some)
                .ok_or_else(|| self.wrong(name, "a whole number of 32 bits")),
        }
    }

    fn size(&self, name: &str) -> Result<u64, String> {
        let found = self.0.get(name).and_then(Value::as_u64).filter(|n| *n != 0);
        found.ok_or_else(|| self.wrong(name, "a whole number above 0"))
    }

    fn list(&self, name: &str) -> Result<&'a [Value], String> {
        match self.0.get(name) {
            None => Ok(&[]),
            Some(v) => v.as_array().map(Vec::as_slice).ok_or_else(|| self.wrong(name, "a list")),
        }
    }

    /// A list of whole numbers.
    fn keys(&self, name: &str) -> Result<(), String> {
        match self.list(name)?.iter().all(Value::is_u64) {
            true => Ok(()),
            false => Err(self.wrong(name, "a list of whole numbers")),
        }
    }
}

/// Devices, and which are preferred for which memory.
fn check_rdma(top: &Members<'_>) -> Result<(), String> {
    for device in top.list("devices")? {
        let device = Members::of(device, "a device of its descriptor")?;
        device.text("name")?;
        device.text("gid")?;
        if device.number("lid")?.is_some_and(|n| n < 0) {
            return Err(device.wrong("lid", "a whole number"));
        }
    }
    let Some(matrix) = top.0.get("priority_matrix") else { return Ok(()) };
    let names = |v: &Value| v.as_array().is_some_and(|a| a.iter().all(Value::is_string));
    let row = |v: &Value| v.as_array().is_some_and(|a| a.len() >= 2 && a.iter().all(names));
    match matrix.as_object().is_some_and(|m| m.values().all(row)) {
        true => Ok(()),
        false => Err(top.wrong("priority_matrix", "lists of devices' names")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn good() -> Value {
        json!({
            "buffers": [{"addr": 8192, "length": 4096, "name": "h:9"}, {"addr": 4096, "length": 64, "name": "h:9"}],
            "name": "h:9", "protocol": "tcp", "rdma_server_name": "", "tcp_data_host": "h", "tcp_data_port": 15381,
            "tcp_proto_version": 2, "timestamp": "t",
        })
    }

    #[test]
    fn what_the_library_says_is_read() {
        let found = Descriptor::check(&good(), "h:9").unwrap();
        assert_eq!((found.data_port, found.first()), (15381, Some(4096)));
        assert!(found.holds(4096, 64) && found.holds(8192 + 4000, 96));
        assert!(
            !found.holds(4096, 65) && !found.holds(4095, 1) && !found.holds(8192, 4097) && !found.holds(u64::MAX, 2)
        );
    }

    #[test]
    fn overlapping_buffers_are_all_looked_at() {
        let buffers = [(0x1000, 0x1000), (0x1100, 0x10)].map(|(addr, len)| Buffer { addr, len });
        let found = Descriptor::tcp("h:9", None, 1, 2, buffers);
        assert!(found.holds(0x1100, 0x100) && !found.holds(0x1100, 0x1000));
    }

    #[test]
    fn r_h2_members_of_odd_types_are_refused_by_name() {
        let odd = [
            ("/name", json!({})),
            ("/name", json!("elsewhere:1")),
            ("/protocol", json!(["tcp"])),
            ("/protocol", json!("nvlink")),
            ("/tcp_data_port", json!("abc")),
            ("/tcp_data_port", json!(70000)),
            ("/tcp_data_port", json!(1e30)),
            ("/tcp_data_port", json!(null)),
            ("/tcp_proto_version", json!([2])),
            ("/tcp_data_host", json!(1)),
            ("/timestamp", json!({"a": 1})),
            ("/buffers", json!({"a": 1})),
            ("/buffers", json!("x")),
            ("/buffers/0", json!(7)),
            ("/buffers/0/addr", json!(-1)),
            ("/buffers/0/addr", json!("0x1")),
            ("/buffers/0/length", json!(1.5)),
            ("/buffers/0/length", json!(0)),
            ("/buffers/0/name", json!([])),
        ];
        for (at, value) in odd {
            let mut descriptor = good();
            *descriptor.pointer_mut(at).unwrap() = value.clone();
            let error = Descriptor::check(&descriptor, "h:9").expect_err(&format!("{at} = {value}"));
            let member = at.rsplit('/').find(|p| p.parse::<u8>().is_err()).unwrap().trim_end_matches('s');
            assert!(error.contains(member) || at == "/name", "{at} = {value}: {error}");
        }
        for whole in [json!([1, 2]), json!(null), json!("x")] {
            assert_eq!(Descriptor::check(&whole, "h:9"), Err("its descriptor is no object".into()));
        }
    }

    #[test]
    fn version_1_is_the_default_and_does_not_acknowledge() {
        for (version, acknowledges) in [(json!(2), true), (json!(3), true), (json!(1), false), (json!(0), false)] {
            let mut descriptor = good();
            descriptor["tcp_proto_version"] = version;
            assert_eq!(Descriptor::check(&descriptor, "h:9").unwrap().acknowledges(), acknowledges);
        }
        let mut descriptor = good();
        descriptor.as_object_mut().unwrap().remove("tcp_proto_version");
        assert_eq!(Descriptor::check(&descriptor, "h:9").unwrap().version, 1);
    }

    #[test]
    fn rdma_descriptors_are_looked_at_too() {
        let rdma = |devices: Value, matrix: Value| {
            let mut d = good();
            d["protocol"] = json!("rdma");
            d["devices"] = devices;
            d["priority_matrix"] = matrix;
            Descriptor::check(&d, "h:9")
        };
        let device = json!([{"name": "mlx5_0", "lid": 0, "gid": "00"}]);
        assert!(rdma(device.clone(), json!({"cpu:0": [["mlx5_0"], []]})).is_ok());
        assert!(rdma(device.clone(), json!({"cpu:0": "x"})).unwrap_err().contains("priority_matrix"));
        assert!(rdma(json!([3]), json!({})).unwrap_err().contains("device"));
        assert!(rdma(json!([{"name": 1}]), json!({})).unwrap_err().contains("name"));
    }

    #[test]
    fn generations_differ_by_port_or_by_all_their_buffers() {
        let at = |port, buffers: &[(u64, u64)]| {
            let buffers = buffers.iter().map(|&(addr, len)| Buffer { addr, len });
            Descriptor::tcp("h:9", None, port, 2, buffers)
        };
        let old = at(1, &[(16, 16), (64, 16)]);
        assert!(old.may_be(&at(1, &[(64, 16), (128, 1)])) && old.may_be(&at(1, &[])));
        assert!(!old.may_be(&at(2, &[(16, 16)])) && !old.may_be(&at(1, &[(32, 16)])));
    }

    #[test]
    fn session_ids_are_host_and_port() {
        assert_eq!(session("10.0.0.7:15592"), Some(("10.0.0.7", 15592)));
        assert_eq!(session("[fe80::1%eth0]:7"), Some(("fe80::1%eth0", 7)));
        for odd in ["", "h", "h:", "h:0", ":5", "h:70000", "a b:1", "a/b:1", "/:1"] {
            assert_eq!(session(odd), None, "{odd}");
        }
    }
}

//! How a source in one process hears of a target in another.

use kv_transfer::Endpoint;
use kv_transfer::host::HostIdentity;
use kv_transfer::transport::{PeerDescriptor, Transport};
use serde_json::{Value, json};

use crate::Result;
use crate::child::{number, numbers, text};
use crate::pair::HOST;

/// What a source needs to know of a target, which is at this port as far as generations go.
pub fn describe(transport: &dyn Transport, base: u64, port: u16) -> Value {
    json!({
        "name": transport.local_name(), "metadata": transport.local_metadata().to_vec(), "base": base, "port": port,
        "host": HostIdentity::local().to_bytes().to_vec(),
    })
}

pub fn metadata(description: &Value) -> Result<Vec<u8>> {
    Ok(numbers(description, "metadata")?.into_iter().map(|b| b as u8).collect())
}

pub fn descriptor(description: &Value) -> Result<PeerDescriptor> {
    let host: Vec<u8> = numbers(description, "host")?.into_iter().map(|b| b as u8).collect();
    Ok(PeerDescriptor {
        name: text(description, "name")?.to_owned(),
        metadata: metadata(description)?.into(),
        endpoint: Endpoint::new(HOST, u16::try_from(number(description, "port")?)?),
        host: host.try_into().ok().map(HostIdentity::from_bytes),
    })
}

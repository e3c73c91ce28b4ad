//! The handshake port: one request a connection.
//!
//! Both ways: a little-endian u64 length of what follows, one byte of [`Kind`], JSON. The kind counts in the length. Before
//! 2025 there was no kind: a first byte above 3 (JSON begins with a bracket) is of that form.
//!
//! The target answers with the same kind, closes its half, and waits for the client's end.

use serde_json::json;

/// Bytes of the length in front.
pub const HEAD_LEN: usize = 8;
/// Longest body that the library takes unless it is told otherwise (`MC_HANDSHAKE_MAX_LENGTH`), bytes.
pub const MAX_LEN: u64 = 1 << 20;
/// What an initiator that registered nothing says of itself. The library does not look at it.
pub const ASK: &str = r#"{"name":"kv-transfer:0","protocol":"tcp","tcp_data_port":0,"buffers":[]}"#;

/// What is asked, and answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Queue pairs of RDMA. Transfers over TCP never send it.
    Connection = 0,
    /// The [`Descriptor`](crate::Descriptor).
    Metadata = 1,
    /// A text for the application.
    Notify = 2,
    /// Whether anybody is there.
    Probe = 3,
}

impl Kind {
    /// The kind with this number.
    pub const fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Connection,
            1 => Self::Metadata,
            2 => Self::Notify,
            3 => Self::Probe,
            _ => return None,
        })
    }
}

/// A length that nobody should wait for, or that leaves no room for a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {len} bytes (1 to {most})")]
pub struct BadLength {
    /// What was announced.
    pub len: u64,
    /// What would be taken.
    pub most: u64,
}

/// A frame; without a kind, in the form before 2025.
pub fn frame(kind: Option<Kind>, json: &[u8]) -> Vec<u8> {
    let len = json.len() as u64 + u64::from(kind.is_some());
    let mut out = len.to_le_bytes().to_vec();
    out.extend(kind.map(|k| k as u8));
    out.extend_from_slice(json);
    out
}

/// Bytes of the body that follow this head.
///
/// # Errors
/// None, or more than `most`.
pub const fn body_len(head: [u8; HEAD_LEN], most: u64) -> Result<usize, BadLength> {
    let len = u64::from_le_bytes(head);
    if len == 0 || len > most || len > usize::MAX as u64 {
        return Err(BadLength { len, most });
    }
    Ok(len as usize)
}

/// The kind of a body and its JSON. `None` as kind: the form before 2025. `None`: there is nothing.
pub fn split(body: &[u8]) -> Option<(Option<Kind>, &[u8])> {
    let (first, rest) = body.split_first()?;
    Some(match Kind::of(*first) {
        Some(kind) => (Some(kind), rest),
        None => (None, body),
    })
}

/// What a target over TCP answers, as a whole frame. `descriptor`: its own, in JSON.
pub fn answer(kind: Option<Kind>, descriptor: &str) -> Vec<u8> {
    let text = match kind {
        None | Some(Kind::Metadata) => descriptor.to_owned(),
        Some(Kind::Notify) => json!({"name": "", "notify_msg": "success"}).to_string(),
        Some(Kind::Probe) => json!({"status": "success"}).to_string(),
        // No RDMA here: the same shape, and nothing in it.
        Some(Kind::Connection) => json!({
            "local_nic_path": "", "peer_nic_path": "", "qp_num": [], "local_lid": 0, "local_gid": "", "reply_msg": "",
        })
        .to_string(),
    };
    frame(kind, text.as_bytes())
}

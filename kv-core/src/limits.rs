//! Every fixed bound in one place.

/// Bounds on what a manager holds and accepts. The defaults suit a large fleet; a bound that is hit is a typed error
/// or a counted drop, never unbounded growth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Live rooms of one manager.
    pub max_rooms: usize,
    /// Metadata messages kept for rooms whose sender does not exist yet.
    pub max_early_rooms: usize,
    /// Chunks one room may have queued or in flight.
    pub max_chunks_per_room: usize,
    /// Writes in flight in one shard; more wait in the rooms.
    pub max_ops_in_flight: usize,
    /// Writes in flight to one peer: one that stalls leaves the others their share.
    pub max_ops_per_peer: usize,
    /// Bytes of page lists kept for rooms whose sender does not exist yet.
    pub max_early_bytes: usize,
    /// Registered peers (decode ranks) of one manager.
    pub max_peers: usize,
    /// Decode endpoints one room may have.
    pub max_peers_per_room: usize,
    /// Open PUSH sockets; the least recently used idle one is closed first. As many connections of peers are accepted.
    pub max_sockets: usize,
    /// Messages queued towards one peer before `send` reports it as stalled.
    pub max_send_queue: i32,
    /// Frames in one message.
    pub max_frames: usize,
    /// Bytes of one frame.
    pub max_frame_bytes: usize,
    /// Bytes of one message.
    pub max_message_bytes: usize,
    /// Page indices in one metadata message.
    pub max_pages: usize,
    /// KV, aux or state entries in one registration.
    pub max_entries: usize,
    /// Bytes of an identity, host name or failure reason.
    pub max_text_bytes: usize,
    /// Body of one HTTP request to the bootstrap server, bytes (SGLang: 1 MiB).
    pub max_http_body: usize,
    /// Rows (ranks) the bootstrap server keeps.
    pub max_registry_rows: usize,
    /// Rooms the bootstrap server remembers a DP rank for.
    pub max_dp_rooms: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_rooms: 1 << 20,
            max_early_rooms: 1 << 16,
            max_chunks_per_room: 4096,
            max_ops_in_flight: 4096,
            max_ops_per_peer: 512,
            max_early_bytes: 256 << 20,
            max_peers: 16_384,
            max_peers_per_room: 256,
            max_sockets: 16_384,
            max_send_queue: 100_000,
            max_frames: 64,
            max_frame_bytes: 64 << 20,
            max_message_bytes: 128 << 20,
            max_pages: 1 << 22,
            max_entries: 1 << 16,
            max_text_bytes: 4096,
            max_http_body: 1 << 20,
            max_registry_rows: 1 << 16,
            max_dp_rooms: 1 << 20,
        }
    }
}

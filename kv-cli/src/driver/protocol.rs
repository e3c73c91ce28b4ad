//! What scheduler and worker say to each other: one JSON object a line, commands on the worker's standard input,
//! events on its standard output. The first command is `configure`; end of input means stop.

use serde::{Deserialize, Serialize};

use crate::driver::stats::RankStats;
use crate::model::ModelSpec;
use crate::pattern::{PageSource, Pattern};
use crate::shape::{Rank, Shape};

/// Which side a worker is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Owns the source pages.
    Prefill,
    /// Owns the destination pages.
    Decode,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Where the registry of prefill ranks is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootstrapAt {
    /// Run it in this worker (prefill only), on this `host:port`; port 0 = any.
    Serve(String),
    /// It runs at this `host:port`.
    Connect(String),
}

/// How the embedded transport moves bytes between two ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum TcpPath {
    /// Copy where both ranks run on one host and the kernel permits it, else stream.
    #[default]
    Auto,
    /// Copy (`process_vm_readv`); a peer that cannot be copied from is refused, with the reason.
    Copy,
    /// Stream over TCP, also on one host.
    Stream,
}

/// Bytes that came into a decode rank, by the way they came. Zeros where the transport does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrived {
    /// Copied out of a process on this host.
    pub copied: u64,
    /// Received over connections.
    pub streamed: u64,
}

impl Arrived {
    /// What came after `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            copied: self.copied.saturating_sub(before.copied),
            streamed: self.streamed.saturating_sub(before.streamed),
        }
    }
}

impl std::ops::AddAssign for Arrived {
    fn add_assign(&mut self, other: Self) {
        self.copied += other.copied;
        self.streamed += other.streamed;
    }
}

/// Everything a worker needs to know before it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerConfig {
    /// Side.
    pub role: Role,
    /// Name of the transport.
    pub transport: String,
    /// Model.
    pub model: ModelSpec,
    /// Parallel sizes of this side.
    pub shape: Shape,
    /// Which rank this is.
    pub rank: Rank,
    /// Pages in the pool.
    pub pool_pages: u32,
    /// What pages hold.
    pub pattern: Pattern,
    /// Registry.
    pub bootstrap: BootstrapAt,
    /// Address that the other side reaches this worker at.
    pub host: String,
    /// How the embedded transport moves bytes.
    pub tcp_path: TcpPath,
    /// Decode: seconds between two looks at a prefill server.
    pub heartbeat_s: u64,
    /// Say `stats` this often, milliseconds; 0: never.
    #[serde(default)]
    pub stats_every_ms: u64,
}

/// One page and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilledPage {
    /// Page number in the pool.
    pub page: u32,
    /// Its content.
    #[serde(flatten)]
    pub source: PageSource,
}

/// One room as prefill sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeRoom {
    /// `bootstrap_room`.
    pub room: u64,
    /// All pages of the request, in token order. Those that decode has already (`decode_prefix_len` of its metadata,
    /// a whole number of pages) are not sent.
    pub pages: Vec<u32>,
}

/// One room as decode sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchRoom {
    /// `bootstrap_room`.
    pub room: u64,
    /// Tokens decode has already: a whole number of pages.
    pub prefix_tokens: u64,
    /// Pages for the rest, in token order.
    pub pages: Vec<u32>,
}

/// Commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case")]
pub enum ToWorker {
    /// First of all. Answer: `ready`.
    Configure(Box<WorkerConfig>),
    /// Prefill: write the pattern into pages that no room uses. Answer: `filled`.
    Fill {
        /// Which, with what.
        pages: Vec<FilledPage>,
    },
    /// Prefill: open these rooms and serve them to their end. Answers: `serving` when all are open, `room` for each,
    /// `serve_done`.
    Serve {
        /// Which rooms.
        rooms: Vec<ServeRoom>,
        /// Pages of a chunk of chunked prefill.
        chunk_pages: u32,
    },
    /// Decode: fetch these rooms, at most `concurrency` at a time, in order. Answers: `room` for each, `fetch_done`.
    Fetch {
        /// Which rooms.
        rooms: Vec<FetchRoom>,
        /// How many at a time.
        concurrency: u32,
    },
    /// Decode: compare pages with the pattern. Answer: `verified`.
    Verify {
        /// Whose pages; comes back in the answer.
        room: u64,
        /// Which, and what they should hold.
        pages: Vec<FilledPage>,
    },
    /// End.
    Stop,
}

/// How a room ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum RoomEnd {
    /// Success.
    Success {
        /// From `send_metadata` (decode) or from the first send (prefill) to Success, nanoseconds.
        latency_ns: u64,
        /// Pages that moved.
        pages: u64,
    },
    /// Failed.
    Failed {
        /// Recorded cause.
        reason: String,
    },
}

/// Events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum FromWorker {
    /// Configured: memory is registered, peers may come.
    Ready {
        /// Where the registry is, when this worker runs it.
        bootstrap: Option<String>,
        /// Bytes of the pool.
        pool_bytes: u64,
    },
    /// Pages are filled.
    Filled {
        /// Bytes written.
        bytes: u64,
        /// Time it took.
        seconds: f64,
    },
    /// All rooms of a `serve` are open.
    Serving,
    /// A room ended here.
    Room {
        /// Which.
        room: u64,
        /// How.
        #[serde(flatten)]
        end: RoomEnd,
    },
    /// Nothing can read or write the pages of this failed room any more.
    Released {
        /// Which.
        room: u64,
    },
    /// Every room of a `serve` ended.
    ServeDone {
        /// CPU of this process meanwhile, seconds.
        cpu_s: f64,
    },
    /// Every room of a `fetch` ended.
    FetchDone {
        /// First `send_metadata` to last end.
        seconds: f64,
        /// CPU of this process meanwhile, seconds.
        cpu_s: f64,
        /// Bytes that came in meanwhile, and how.
        arrived: Arrived,
    },
    /// Pages were compared.
    Verified {
        /// Whose.
        room: u64,
        /// How many.
        pages: u64,
        /// With a wrong byte.
        corrupt: u64,
        /// The first wrong word, in words.
        first: Option<String>,
        /// Time it took.
        seconds: f64,
    },
    /// What the rank's manager counts. Comes by itself: see [`WorkerConfig::stats_every_ms`].
    Stats {
        /// The numbers.
        stats: Box<RankStats>,
    },
    /// The worker cannot go on and ends.
    Error {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_json_objects_with_a_tag() {
        let fill =
            ToWorker::Fill { pages: vec![FilledPage { page: 3, source: PageSource { id: 9, first_token: 64 } }] };
        let text = serde_json::to_string(&fill).unwrap();
        assert_eq!(text, r#"{"cmd":"fill","pages":[{"page":3,"id":9,"first_token":64}]}"#);
        assert_eq!(serde_json::from_str::<ToWorker>(&text).unwrap(), fill);
        let room = FromWorker::Room { room: 5, end: RoomEnd::Failed { reason: "x".into() } };
        let text = serde_json::to_string(&room).unwrap();
        assert_eq!(text, r#"{"event":"room","room":5,"end":"failed","reason":"x"}"#);
        assert_eq!(serde_json::from_str::<FromWorker>(&text).unwrap(), room);
    }

    #[test]
    fn a_configuration_survives_the_pipe() {
        let config = ToWorker::Configure(Box::new(WorkerConfig {
            role: Role::Decode,
            transport: "tcp".into(),
            model: ModelSpec::preset("DeepSeek-V3").unwrap(),
            shape: Shape::default(),
            rank: Rank::default(),
            pool_pages: 7,
            pattern: Pattern::Keyed { seed: u64::MAX },
            bootstrap: BootstrapAt::Connect("[::1]:8998".into()),
            host: "::1".into(),
            tcp_path: TcpPath::Stream,
            heartbeat_s: 2,
            stats_every_ms: 100,
        }));
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ToWorker>(&text).unwrap(), config);
    }
}

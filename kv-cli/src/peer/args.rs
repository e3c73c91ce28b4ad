//! The options of a peer. They are those of the program around the real SGLang (`interop/`), so that either can take
//! either side of a case; what only that one can do is refused by name.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::error::{CliError, Result};

/// Roles of a peer.
#[derive(Debug, Subcommand)]
pub enum PeerCommand {
    /// A prefill rank, with the bootstrap server unless --no-bootstrap.
    #[command(args_override_self = true)]
    Prefill(PrefillArgs),
    /// A decode rank.
    #[command(args_override_self = true)]
    Decode(DecodeArgs),
    /// The bootstrap server alone, until standard input ends.
    #[command(args_override_self = true)]
    Bootstrap(CommonArgs),
}

impl PeerCommand {
    /// What every role is told.
    pub fn common(&self) -> &CommonArgs {
        match self {
            Self::Prefill(args) => &args.common,
            Self::Decode(args) => &args.common,
            Self::Bootstrap(args) => args,
        }
    }
}

/// Kinds of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attn {
    /// K and V, heads split over TP ranks.
    Mha,
    /// One row a token, the same on every TP rank.
    Mla,
}

/// In which order a room uses its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// Ascending.
    Contiguous,
    /// Descending.
    Reversed,
    /// Random, by room.
    Shuffled,
    /// Every other one, then the rest.
    Strided,
}

/// Aux buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Aux {
    /// SGLang's ten.
    Sglang,
    /// One more, for a checksum of the KV.
    Checksum,
}

/// Whether registrations name the layer of each buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayerIds {
    /// No, as SGLang for plain pools.
    None,
    /// Yes.
    Force,
}

/// What decode calls its pool on the wire (nixl).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemKind {
    /// VRAM.
    Auto,
    /// What it is. A prefill of 0.5.23 with several PP stages does not survive it.
    #[value(name = "DRAM")]
    Dram,
    /// As 0.5.23 calls its own unless told otherwise, though it is host memory; prefill must know better.
    #[value(name = "VRAM")]
    Vram,
}

/// Room numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomList(pub Vec<u64>);

impl std::str::FromStr for RoomList {
    type Err = CliError;

    fn from_str(text: &str) -> Result<Self> {
        let number = |t: &str| {
            t.trim().parse::<u64>().map_err(|_| {
                CliError::new(format!("'{t}' in --rooms {text} is no room number")).hint("write 100:4, or 7,9,12")
            })
        };
        let mut rooms = Vec::new();
        for part in text.split(',') {
            match part.split_once(':') {
                Some((first, n)) => {
                    let (first, n) = (number(first)?, number(n)?);
                    let end = first.checked_add(n).filter(|_| n <= MAX_ROOMS && rooms.len() as u64 + n <= MAX_ROOMS);
                    let end = end.ok_or_else(|| CliError::new(format!("--rooms {text} are more than {MAX_ROOMS}")))?;
                    rooms.extend(first..end);
                }
                None => rooms.push(number(part)?),
            }
        }
        if rooms.contains(&0) {
            return Err(CliError::new("room 0 cannot be used").hint("0 marks a metadata row that was not written"));
        }
        Ok(Self(rooms))
    }
}

/// Most rooms of one run.
const MAX_ROOMS: u64 = 1 << 20;

/// What every role is told.
#[derive(Clone, Debug, Args)]
pub struct CommonArgs {
    /// Transport, and dialect of the messages.
    #[arg(long, default_value = "nixl")]
    pub backend: String,
    /// Address of the bootstrap server.
    #[arg(long, default_value = "127.0.0.1")]
    pub bootstrap_host: String,
    /// Its port.
    #[arg(long, default_value_t = 8998)]
    pub bootstrap_port: u16,
    /// Address that the other side reaches this rank at.
    #[arg(long, default_value = "127.0.0.1")]
    pub host_ip: String,
    /// Rooms, in order: A:N (N rooms from A on), or a,b,c.
    #[arg(long, default_value = "1000:1")]
    pub rooms: RoomList,
    /// The first N rooms run before, and outside, the measured window.
    #[arg(long, default_value_t = 0)]
    pub warmup: usize,
    /// Rooms open at a time; 0: all.
    #[arg(long, default_value_t = 0)]
    pub concurrency: usize,
    /// Rooms beyond the first N start once a line comes on standard input, or it ends.
    #[arg(long, value_name = "N")]
    pub gate: Option<usize>,
    /// Give up on all rooms after this long, seconds.
    #[arg(long, default_value_t = 120.0)]
    pub timeout: f64,
    /// No event for rooms that went well.
    #[arg(long)]
    pub quiet: bool,
    /// Append every control message to this file, a JSON line each.
    #[arg(long, value_name = "FILE")]
    pub capture: Option<PathBuf>,
    /// K=V of the environment, set before anything else.
    #[arg(long, value_name = "K=V")]
    pub env: Vec<String>,
    /// For the other program: the sleep between two of its looks. Nothing is polled here.
    #[arg(long, hide = true)]
    pub poll_us: Option<u64>,

    /// Attention TP size of this role.
    #[arg(long, default_value_t = 1, help_heading = "Topology")]
    pub tp_size: u32,
    /// Attention TP rank.
    #[arg(long, default_value_t = 0, help_heading = "Topology")]
    pub tp_rank: u32,
    /// PP size.
    #[arg(long, default_value_t = 1, help_heading = "Topology")]
    pub pp_size: u32,
    /// PP rank.
    #[arg(long, default_value_t = 0, help_heading = "Topology")]
    pub pp_rank: u32,
    /// DP groups; each serves the rooms whose number modulo this is its rank.
    #[arg(long, default_value_t = 1, help_heading = "Topology")]
    pub dp_size: u32,
    /// DP rank.
    #[arg(long, default_value_t = 0, help_heading = "Topology")]
    pub dp_rank: u32,
    /// --dp-size counts replicas of the server, not attention DP.
    #[arg(long, help_heading = "Topology")]
    pub system_dp: bool,
    /// Start a process for each rank of this role.
    #[arg(long, help_heading = "Topology")]
    pub all_ranks: bool,
    /// follow_bootstrap_room: a room's DP rank is its number modulo the size; anything else: it is looked up.
    #[arg(long, default_value = "follow_bootstrap_room", help_heading = "Topology")]
    pub load_balance_method: String,

    /// Kind of attention.
    #[arg(long, value_enum, default_value_t = Attn::Mla, help_heading = "KV")]
    pub attn: Attn,
    /// Layers of the whole model.
    #[arg(long, default_value_t = 32, help_heading = "KV")]
    pub layers: u32,
    /// Pages of a room.
    #[arg(long, default_value_t = 256, help_heading = "KV")]
    pub pages: u32,
    /// Pages in the pool; 0: enough for all rooms. A smaller one is used again from its start (with --share-src).
    #[arg(long, default_value_t = 0, help_heading = "KV")]
    pub pool_pages: u32,
    /// Tokens in a page.
    #[arg(long, default_value_t = 64, help_heading = "KV")]
    pub page_size: u32,
    /// Bytes of a page in one buffer of this rank.
    #[arg(long, default_value_t = 16384, help_heading = "KV")]
    pub item_len: u32,
    /// KV heads of the whole model (mha).
    #[arg(long, default_value_t = 8, help_heading = "KV")]
    pub heads: u32,
    /// Name of the KV's data type.
    #[arg(long, default_value = "bfloat16", help_heading = "KV")]
    pub dtype_str: String,
    /// Order in which a room uses its pages.
    #[arg(long, value_enum, default_value_t = Order::Contiguous, help_heading = "KV")]
    pub page_order: Order,
    /// All rooms carry the same bytes; prefill keeps one copy.
    #[arg(long, help_heading = "KV")]
    pub share_src: bool,
    /// Whether registrations name each buffer's layer.
    #[arg(long, value_enum, default_value_t = LayerIds::None, help_heading = "KV")]
    pub layer_ids: LayerIds,
    /// What decode calls its pool (nixl).
    #[arg(long, value_enum, default_value_t = MemKind::Auto, help_heading = "KV")]
    pub mem_kind: MemKind,
    /// Aux buffers.
    #[arg(long, value_enum, default_value_t = Aux::Sglang, help_heading = "KV")]
    pub aux: Aux,
    /// Hidden size: bytes of the largest aux row / 2.
    #[arg(long, default_value_t = 4096, help_heading = "KV")]
    pub hidden_size: u32,
}

/// `prefill`.
#[derive(Clone, Debug, Args)]
pub struct PrefillArgs {
    /// What every role is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Register at a bootstrap server that is already running.
    #[arg(long)]
    pub no_bootstrap: bool,
    /// Pages of a chunk; 0: one chunk.
    #[arg(long, default_value_t = 0)]
    pub chunk_pages: usize,
    /// Time between two chunks of a room, ms.
    #[arg(long, default_value_t = 0.0)]
    pub chunk_delay_ms: f64,
    /// none, before-send, after-chunk:K, hang:K (no more after K chunks), kill:K (SIGKILL to this process after K).
    #[arg(long, default_value = "none")]
    pub abort_at: PrefillAbort,
    /// Rooms that --abort-at is for; default: all.
    #[arg(long)]
    pub abort_rooms: Option<RoomList>,
    /// Stay this long after the last room, seconds.
    #[arg(long, default_value_t = 1.0)]
    pub linger: f64,
    /// Stay until standard input ends, or SIGTERM.
    #[arg(long)]
    pub serve: bool,
    /// How long a room waits for decode's metadata, seconds. Default: SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, or 300.
    #[arg(long)]
    pub boot_timeout: Option<f64>,
}

/// `decode`.
#[derive(Clone, Debug, Args)]
pub struct DecodeArgs {
    /// What every role is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Pages of each room that decode says it has.
    #[arg(long, default_value_t = 0)]
    pub decode_prefix_pages: u32,
    /// Verify every byte at the end, or none.
    #[arg(long, value_enum, default_value_t = Verify::End)]
    pub verify: Verify,
    /// Spoil a byte before verifying: the control of the verifier.
    #[arg(long, value_enum, default_value_t = Corrupt::None)]
    pub self_test_corrupt: Corrupt,
    /// Seconds between WaitingForInput and the metadata of a room.
    #[arg(long, default_value_t = 0.0)]
    pub hold: f64,
    /// none, before-metadata, `after-metadata[:MS]`, `kill[:MS]` (SIGKILL to this process, MS after a room's metadata).
    #[arg(long, default_value = "none")]
    pub d_abort_at: DecodeAbort,
    /// Rooms that --d-abort-at is for; default: all.
    #[arg(long)]
    pub d_abort_rooms: Option<RoomList>,
    /// How long to wait for the bootstrap server, seconds.
    #[arg(long, default_value_t = 60.0)]
    pub connect_timeout: f64,
    /// Stay this long after the last room, seconds: a dummy prefill rank may not have got its metadata.
    #[arg(long, default_value_t = 1.0)]
    pub d_linger: f64,
    /// How long a room waits after its metadata, seconds. Default: SGLANG_DISAGGREGATION_WAITING_TIMEOUT, or 300.
    #[arg(long)]
    pub wait_timeout: Option<f64>,
    /// Pages of a room that was aborted are free after this without an ACK, seconds. Default:
    /// SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT, or 30.
    #[arg(long)]
    pub release_timeout: Option<f64>,
    /// Between two looks at the prefill server, seconds; at least 2. Default: SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL, or 5.
    #[arg(long)]
    pub heartbeat: Option<f64>,
    /// Send our extension to whoever prefill is, to show that 0.5.23 takes no notice of it.
    #[arg(long)]
    pub offer_extension: bool,
    /// For a bench's common options: prefill's, of no use here.
    #[arg(long, hide = true)]
    pub chunk_pages: Option<usize>,
}

/// Verification of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// After the last room.
    End,
    /// Not at all.
    None,
}

/// Which byte to spoil.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Corrupt {
    /// None.
    None,
    /// One of a room's KV.
    Kv,
    /// One of a room's aux rows.
    Aux,
    /// One that no room owns.
    Stray,
}

/// What prefill does to a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillAbort {
    /// Nothing.
    None,
    /// Abort it when decode is known.
    BeforeSend,
    /// Abort it after so many chunks.
    AfterChunk(usize),
    /// Send no more after so many chunks.
    Hang(usize),
    /// Kill this process after so many chunks.
    Kill(usize),
}

impl std::str::FromStr for PrefillAbort {
    type Err = CliError;

    fn from_str(text: &str) -> Result<Self> {
        let (word, k) = text.split_once(':').unwrap_or((text, "0"));
        let k = k.parse().map_err(|_| bad_abort("--abort-at", text))?;
        Ok(match word {
            "none" => Self::None,
            "before-send" => Self::BeforeSend,
            "after-chunk" => Self::AfterChunk(k),
            "hang" => Self::Hang(k),
            "kill" => Self::Kill(k),
            _ => return Err(bad_abort("--abort-at", text)),
        })
    }
}

/// What decode does to a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeAbort {
    /// Nothing.
    None,
    /// Abort it instead of sending its metadata.
    BeforeMetadata,
    /// Abort it so long after its metadata.
    AfterMetadata(Duration),
    /// Kill this process so long after its metadata.
    Kill(Duration),
}

impl std::str::FromStr for DecodeAbort {
    type Err = CliError;

    fn from_str(text: &str) -> Result<Self> {
        let (word, ms) = text.split_once(':').unwrap_or((text, "0"));
        let ms = ms.parse::<f64>().ok().and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
        let after = ms.ok_or_else(|| bad_abort("--d-abort-at", text))?;
        Ok(match word {
            "none" => Self::None,
            "before-metadata" => Self::BeforeMetadata,
            "after-metadata" => Self::AfterMetadata(after),
            "kill" => Self::Kill(after),
            _ => return Err(bad_abort("--d-abort-at", text)),
        })
    }
}

fn bad_abort(option: &str, text: &str) -> CliError {
    CliError::new(format!("{option} {text} is unknown")).hint("see --help")
}

/// Seconds of an option.
pub fn seconds(option: &str, s: f64) -> Result<Duration> {
    let bad = |_| CliError::new(format!("{option} {s} is no time")).hint("give seconds, like 2.5");
    Duration::try_from_secs_f64(s).map_err(bad)
}

impl DecodeArgs {
    /// How long pages wait for an ACK.
    pub fn release(&self) -> Result<Duration> {
        time_of("--release-timeout", self.release_timeout, "DEFERRED_DECODE_KV_RELEASE_TIMEOUT", 30.0)
    }
}

/// A time that SGLang takes from the environment, where no option says otherwise.
pub fn time_of(option: &str, given: Option<f64>, variable: &str, default: f64) -> Result<Duration> {
    let name = format!("SGLANG_DISAGGREGATION_{variable}");
    match (given, std::env::var(&name).ok().filter(|v| !v.is_empty())) {
        (Some(s), _) => seconds(option, s),
        (None, Some(text)) => {
            let bad = |_| CliError::new(format!("{name}={text} is no time")).hint("give seconds, like 2.5");
            seconds(&name, text.parse().map_err(bad)?)
        }
        (None, None) => seconds(option, default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_ranges_and_lists() {
        let rooms = |t: &str| t.parse::<RoomList>().map(|r| r.0);
        assert_eq!(rooms("100:3"), Ok(vec![100, 101, 102]));
        assert_eq!(rooms("7,9,20:2"), Ok(vec![7, 9, 20, 21]));
        for bad in ["", "a", "1:", "0:2", "1:99999999999", "18446744073709551615:2", "-1"] {
            assert!(rooms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn aborts_are_words_with_a_number() {
        assert_eq!("after-chunk:2".parse(), Ok(PrefillAbort::AfterChunk(2)));
        assert_eq!("kill:0".parse(), Ok(PrefillAbort::Kill(0)));
        assert_eq!("after-metadata:300".parse(), Ok(DecodeAbort::AfterMetadata(Duration::from_millis(300))));
        assert_eq!("kill".parse(), Ok(DecodeAbort::Kill(Duration::ZERO)));
        assert!("kill:x".parse::<PrefillAbort>().is_err() && "later".parse::<DecodeAbort>().is_err());
        assert!("kill:-1".parse::<DecodeAbort>().is_err());
    }
}

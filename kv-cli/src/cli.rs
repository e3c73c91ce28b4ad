//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::driver::protocol::TcpPath;
use crate::model::DEFAULT_PAGE_TOKENS;
use crate::peer::args::PeerCommand;
use crate::pool::PageOrder;
use crate::shape::Shape;

/// Run, replay, measure and diagnose KV-cache transfers between prefill and decode workers.
#[derive(Debug, Parser)]
#[command(name = "kvt", version, propagate_version = true)]
pub struct Cli {
    /// Print one JSON object as the last line of standard output.
    #[arg(long, global = true)]
    pub json: bool,
    /// Seed of page contents and page order: the same seed gives the same run.
    #[arg(long, global = true, default_value_t = 1)]
    pub seed: u64,
    /// What pages hold.
    #[arg(long, global = true, value_enum, default_value_t = PatternArg::Keyed)]
    pub pattern: PatternArg,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Contents of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PatternArg {
    /// Keyed by source block, layer, K/V, token, head and word.
    Keyed,
    /// Keyed by room: the pattern of the interoperability harness around the real SGLang. No prefix cache.
    Sglang,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the registry that prefill ranks register at and decode ranks ask.
    Bootstrap(BootstrapArgs),
    /// One prefill rank (of two machines; see `replay` for both sides on one).
    #[command(after_long_help = STATS_HELP)]
    Prefill(RoleArgs),
    /// One decode rank (of two machines; see `replay` for both sides on one).
    #[command(after_long_help = STATS_HELP)]
    Decode(RoleArgs),
    /// Replay a sample trace between two processes on this machine and verify every byte. Takes about a minute.
    #[command(after_long_help = crate::report::JSON_HELP)]
    Demo(DemoArgs),
    /// Replay a request trace between prefill and decode ranks on this machine, each a process.
    #[command(after_long_help = crate::report::JSON_HELP)]
    Replay(ReplayArgs),
    /// Simulate fleets under faults: many room lives, each checked. One episode is replayed by its seed.
    #[cfg(feature = "sim")]
    Sim(SimArgs),
    /// One rank of a room list, for the other side to be another implementation: the real SGLang (see interop/), or yours.
    #[command(subcommand)]
    Peer(Box<PeerCommand>),
    /// Say which transports and devices work here, which do not, why, and what would change that.
    Doctor,
    /// Control messages.
    #[command(subcommand)]
    Wire(WireCommand),
}

impl Command {
    /// `kvt sim`.
    pub fn is_simulation(&self) -> bool {
        #[cfg(feature = "sim")]
        return matches!(self, Self::Sim(_));
        #[cfg(not(feature = "sim"))]
        false
    }

    /// Whether this very process may open this transport: a rank does. One that `replay` runs hears of its transport later.
    pub fn may_open(&self, transport: &str) -> bool {
        match self {
            Self::Prefill(args) | Self::Decode(args) => args.worker || args.workload.transport == transport,
            Self::Peer(command) => command.common().backend == transport,
            _ => false,
        }
    }
}

/// `kvt sim`.
#[cfg(feature = "sim")]
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Run episodes until so many room lives have ended. 1: the episode of --seed alone.
    #[arg(long, default_value_t = 20_000)]
    pub rooms: u64,
    /// Print everything that happens in the last episode, a line an event.
    #[arg(long)]
    pub trace: bool,
}

/// `kvt bootstrap`.
#[derive(Debug, Args)]
pub struct BootstrapArgs {
    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub host: String,
    /// Port to listen on; 0 = any.
    #[arg(long, default_value_t = 8998)]
    pub port: u16,
}

/// What is replayed, and in which memory. Two machines must be given the same values.
#[derive(Clone, Debug, Args)]
pub struct WorkloadArgs {
    /// JSON lines of a Mooncake trace, `-` for standard input, or `synthetic:tokens=N[,shared]`. Default: a built-in
    /// sample of 500 requests.
    #[arg(long)]
    pub trace: Option<String>,
    /// Preset (Qwen3-0.6B, Qwen3-8B, Llama-3.1-70B, DeepSeek-V3) or the path of a HuggingFace config.json.
    #[arg(long, default_value = "Qwen3-0.6B")]
    pub model: String,
    /// Tokens in a page: a part of the trace's blocks of 512.
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_PAGE_TOKENS)]
    pub page_tokens: u32,
    /// How many requests of the trace.
    #[arg(long, default_value_t = 32)]
    pub requests: usize,
    /// Rooms in flight at a time.
    #[arg(long, default_value_t = 4)]
    pub concurrency: u32,
    /// Cut requests to this many tokens.
    #[arg(long, value_name = "TOKENS")]
    pub max_tokens: Option<u32>,
    /// Memory for the pools of one side, MiB, shared by its ranks. `replay` without it: a part of the free memory.
    #[arg(long, value_name = "MIB")]
    pub pool_mib: Option<u64>,
    /// Which free pages a request gets.
    #[arg(long, value_enum, default_value_t = PageOrder::Shuffled)]
    pub pages: PageOrder,
    /// Decode asks for every page, also of prefixes it has seen.
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// With --pattern sglang: all rooms read the same source pages (needs a shared synthetic trace).
    #[arg(long)]
    pub share_src: bool,
    /// Do not measure the fixed overhead of a room first.
    #[arg(long)]
    pub no_probe: bool,
    /// How bytes travel: tcp needs nothing, nixl NVIDIA's library, mooncake the transfer engine's (`kvt doctor` says whether they are here).
    #[arg(long, default_value = "tcp")]
    pub transport: String,
    /// Transport tcp: copy between processes of one host, or stream over connections. `auto` copies where it can.
    #[arg(long, value_enum, default_value_t = TcpPath::Auto)]
    pub tcp_path: TcpPath,
    /// Decode looks at a prefill server this often; after two misses in a row its rooms fail.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub heartbeat_s: u64,
}

/// `kvt replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// What is replayed.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// Parallel sizes of prefill: tp=2,pp=1,cp=1,dp=1; what is left out is 1.
    #[arg(long, default_value = "tp=1")]
    pub prefill: Shape,
    /// Parallel sizes of decode.
    #[arg(long, default_value = "tp=1")]
    pub decode: Shape,
    /// Address that the ranks use.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port of the registry; 0 = any.
    #[arg(long, default_value_t = 0)]
    pub bootstrap_port: u16,
}

/// `kvt demo`: [`ReplayArgs`] with everything given a default.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// What is replayed.
    #[command(flatten)]
    pub workload: WorkloadArgs,
}

/// The numbers of `--stats-every` for people.
const STATS_HELP: &str = "\
The lines of --stats-every hold every counter and gauge of the rank by name. Those that show the release rules:
  rooms_awaiting_release  failed rooms whose pages are not free yet, since a write could still reach them
  released_with_proof, released_without_proof
                          decode: rooms whose pages came back by proof (an ACK, or the death of the process), and
                          by the timeout; the latter also by peer
  ops_in_flight           prefill: writes whose outcome has not come
  ops_retained, bytes_retained, retained_oldest_s
                          prefill: writes that ended without proof of quiet, their bytes, and the age of the oldest,
                          seconds; also by peer";

/// `kvt prefill` and `kvt decode`.
#[derive(Debug, Args)]
pub struct RoleArgs {
    /// What is replayed.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// Registry: `host:port` of `kvt bootstrap`, or of the prefill rank that runs it (--serve-bootstrap).
    #[arg(long, value_name = "HOST:PORT", required_unless_present_any = ["worker", "serve_bootstrap"])]
    pub bootstrap: Option<String>,
    /// Prefill only: run the registry in this process, here.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "bootstrap")]
    pub serve_bootstrap: Option<String>,
    /// Address that the other side reaches this rank at.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// How long to wait for the registry to come up and, then, decode for a prefill that lives, seconds each.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub connect_timeout: u64,
    /// Print what this rank counts this often, and after each wave: JSON lines, {"stats": {..}}, on standard output
    /// before the result.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stats_every: Option<u64>,
    /// TP size of this side.
    #[arg(long, default_value_t = 1)]
    pub tp_size: u32,
    /// TP rank of this process.
    #[arg(long, default_value_t = 0)]
    pub tp_rank: u32,
    /// PP size of this side.
    #[arg(long, default_value_t = 1)]
    pub pp_size: u32,
    /// PP rank of this process.
    #[arg(long, default_value_t = 0)]
    pub pp_rank: u32,
    /// Take commands as JSON lines on standard input (how `replay` runs its ranks).
    #[arg(long, hide = true)]
    pub worker: bool,
}

/// `kvt wire`.
#[derive(Debug, Subcommand)]
pub enum WireCommand {
    /// Print control messages in words. Frames are hex, one a line, an empty line ends a message; or one JSON array of
    /// hex strings a line; or the lines of a file of `kvt peer --capture`.
    Decode(WireDecodeArgs),
}

/// `kvt wire decode`.
#[derive(Debug, Args)]
pub struct WireDecodeArgs {
    /// Whose frames.
    #[arg(long, value_enum, default_value_t = DialectArg::Nixl)]
    pub dialect: DialectArg,
    /// File to read; standard input when left out.
    pub file: Option<PathBuf>,
}

/// Dialects of control messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DialectArg {
    /// NIXL.
    Nixl,
    /// Mooncake.
    Mooncake,
    /// MORI.
    Mori,
    /// The embedded transport: NIXL's frames with a guard of its own.
    Tcp,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn reads_the_lines_of_the_manual() {
        let cli = Cli::try_parse_from([
            "kvt",
            "replay",
            "--trace",
            "t.jsonl",
            "--model",
            "Qwen3-8B",
            "--requests",
            "9",
            "--concurrency",
            "2",
            "--prefill",
            "tp=2,pp=1,cp=1,dp=1",
            "--decode",
            "tp=2",
            "--json",
            "--seed",
            "5",
            "--pattern",
            "sglang",
        ])
        .unwrap();
        assert!(cli.json && cli.seed == 5 && cli.pattern == PatternArg::Sglang);
        let Command::Replay(args) = cli.command else { panic!("{:?}", cli.command) };
        assert_eq!((args.prefill.tp, args.decode.tp, args.workload.requests), (2, 2, 9));
        for line in [
            "kvt demo",
            "kvt doctor --json",
            "kvt bootstrap --host :: --port 0",
            "kvt prefill --bootstrap 10.0.0.1:8998 --transport tcp --tp-rank 1 --tp-size 2",
            "kvt prefill --serve-bootstrap 0.0.0.0:8998 --host 10.0.0.1",
            "kvt decode --bootstrap [::1]:8998",
            "kvt decode --worker",
            "kvt decode --bootstrap h:1 --stats-every 5",
            "kvt wire decode --dialect mori frames.txt",
            "kvt peer prefill --backend tcp --rooms 100:4 --attn mha --abort-at kill:2 --abort-rooms 101",
            "kvt peer decode --rooms 7,9 --gate 1 --d-abort-at after-metadata:300 --all-ranks --tp-size 2",
            "kvt peer bootstrap --bootstrap-host ::1 --bootstrap-port 0",
        ] {
            Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
    }

    /// The block of commands in README.md: each line is a command, then, behind two blanks, what it is for.
    #[test]
    fn reads_the_commands_of_the_readme() {
        let readme = include_str!("../../README.md");
        let lines: Vec<_> = readme.lines().filter(|l| l.starts_with("kvt ")).collect();
        assert!(lines.len() >= 8, "{lines:?}");
        for line in lines {
            let command = line.split("  ").next().unwrap_or(line);
            Cli::try_parse_from(command.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
    }

    #[test]
    fn refuses_what_cannot_work() {
        for line in
            ["kvt", "kvt decode", "kvt replay --prefill tp=0", "kvt demo --pages odd", "kvt wire decode --dialect x"]
        {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}

//! 100,000 rooms that wait: bytes a room (growth of resident memory, handles included) and CPU while nothing happens.
//!
//! Senders have queued a chunk of 256 pages and wait for decode; receivers have published 256 pages and wait for
//! prefill, which is a socket that reads and never answers. So a page list of 1 KiB is in each room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_transfer::bootstrap::{BootstrapServer, RegistrationConfig, register_prefill_rank};
use kv_transfer::hooks::TcpHooks;
use kv_transfer::manager::{PrefillConfig, PrefillManager};
use kv_transfer::tcp::{TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, Limits};
use serde_json::json;

use crate::child::{Link, Peer, number};
use crate::exchange::{pull, recv};
use crate::pair::{Decode, Geometry, HOST, PATIENCE, Prefill, publish, why};
use crate::report::{Budget, Report, Row};
use crate::sys::{process_cpu_ns, rss_bytes};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["idle_rooms_senders", "idle_rooms_receivers"];
pub const SENDERS: &str = "idle_senders";
pub const RECEIVERS: &str = "idle_receivers";
const GEOMETRY: Geometry = Geometry { layers: 1, pages: 4096, page: 64 };
const COUNT: usize = 100_000;
const BUDGET: f64 = 4096.0;
const PAGES: i32 = 256;
/// Rooms made before anything is counted, so that start-up is not.
const WARM: u64 = 1000;

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let (count, secs) = (options.count(COUNT) as u64, if options.quick { 1 } else { 3 });
    for (row, role) in ROWS.iter().zip([SENDERS, RECEIVERS]) {
        if !options.wants(row) {
            continue;
        }
        let mut peer = Peer::start(role)?;
        let reply = peer.ask(&json!({ "count": count, "secs": secs }))?;
        let bytes = number(&reply, "bytes")? as f64 / count as f64;
        let made = number(&reply, "made_ns")? as f64 / count as f64 / 1e3;
        let cpu = number(&reply, "cpu")? as f64 / secs as f64 / 1e9;
        report.add(Row {
            row: (*row).to_owned(),
            ours: bytes,
            peer: BUDGET,
            unit: "B a room",
            budget: Budget::AtMost(BUDGET),
            cpu: format!("{:.3} % of a core idle", cpu * 100.0),
            note: format!(
                "{count} live rooms with 256 pages each, {made:.1} us CPU to make one; floor column: the budget"
            ),
        });
    }
    Ok(())
}

/// Memory and CPU of what `make` makes, which lives until the measurement is over.
fn measure<T>(link: &mut Link, mut make: impl FnMut(std::ops::Range<u64>) -> Result<Vec<T>>) -> Result<()> {
    let Some(request) = link.next()? else { return Ok(()) };
    let (count, secs) = (number(&request, "count")?, number(&request, "secs")?);
    let warm = make(1..WARM + 1)?;
    let (bytes, cpu) = (rss_bytes()?, process_cpu_ns());
    let rooms = make(WARM + 1..WARM + 1 + count)?;
    let made_ns = process_cpu_ns() - cpu;
    std::thread::sleep(Duration::from_millis(500));
    let bytes = rss_bytes()?.saturating_sub(bytes);
    let cpu = process_cpu_ns();
    std::thread::sleep(Duration::from_secs(secs));
    let cpu = process_cpu_ns() - cpu;
    link.say(&json!({ "bytes": bytes, "made_ns": made_ns, "cpu": cpu }))?;
    drop((warm, rooms));
    Ok(())
}

fn page_list() -> Vec<i32> {
    (0..PAGES).map(|p| p * 7).collect()
}

pub fn senders(link: &mut Link) -> Result<()> {
    let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
    let region = transport.register(GEOMETRY.arena()?)?;
    let prefill = Prefill::start(transport, GEOMETRY.layout(region)?)?;
    let pages = page_list();
    measure(link, |rooms| rooms.map(|n| prefill.send(n, &pages)).collect())
}

pub fn receivers(link: &mut Link) -> Result<()> {
    // A prefill rank whose control socket is read and never answers.
    let context = zmq::Context::new();
    let (socket, port) = pull(&context)?;
    let heard = Arc::new(AtomicU64::new(0));
    let count = heard.clone();
    std::thread::spawn(move || {
        let mut frames = Vec::new();
        while recv(&socket, &mut frames).is_ok() {
            count.fetch_add(1, Ordering::Release);
        }
    });
    let server = BootstrapServer::bind(HOST, 0, Limits::default())?;
    let bootstrap = server.local_addr().port();
    {
        let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
        let region = transport.register(GEOMETRY.arena()?)?;
        let config = PrefillConfig { host: Some(HOST.into()), ..PrefillConfig::default() };
        let real = PrefillManager::start(config, transport, Arc::new(TcpHooks::new()), GEOMETRY.layout(region)?)?;
        let row = kv_transfer::bootstrap::PrefillRow { rank_port: u16::try_from(port)?, ..real.row() };
        register_prefill_rank(&RegistrationConfig::new(HOST, bootstrap), &row)?;
    }
    let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
    let region = transport.register(GEOMETRY.arena()?)?;
    let decode = Decode::start(transport, GEOMETRY.layout(region)?, &format!("{HOST}:{bootstrap}"))?;
    let pages = page_list();
    let mut published = 0;
    measure(link, |rooms| {
        let mut all = Vec::with_capacity((rooms.end - rooms.start) as usize);
        for start in rooms.clone().step_by(1000) {
            for receiver in decode.ready(start..rooms.end.min(start + 1000))? {
                publish(&receiver, &pages)?;
                published += 1;
                all.push(receiver);
            }
            // No faster than the socket is read: what waits in it would count as memory of the rooms.
            let deadline = std::time::Instant::now() + PATIENCE;
            while heard.load(Ordering::Acquire) < published {
                if std::time::Instant::now() > deadline {
                    return Err("the metadata does not arrive".into());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        match all.iter().find(|r| r.poll() == KvPoll::Failed) {
            Some(failed) => Err(why(failed)),
            None => Ok(all),
        }
    })
}

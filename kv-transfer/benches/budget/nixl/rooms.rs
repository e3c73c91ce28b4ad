//! Fixed cost of a room over NIXL, as in `rooms`. Floor: the same bare exchange, page and row written by the bare library.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::memory::MemoryOwner;
use kv_transfer::nixl::{NixlConfig, NixlTransport, prepare_environment};
use serde_json::json;

use super::bare::Agent;
use crate::child::{Link, number};
use crate::pair;
use crate::report::Report;
use crate::rooms::{Bench, GEOMETRY, measure, serve};
use crate::{Options, Result, target};

pub const ROWS: &[&str] = &["nixl_room_idle", "nixl_room_back_to_back", "nixl_rooms_per_s"];
pub const ROLE: &str = "nixl_rooms";

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let transport = Arc::new(NixlTransport::new(NixlConfig::default())?);
    let bench =
        Bench::start(ROLE, transport, |t, base| json!({ "base": base, "target": target::describe(t, base, 1) }))?;
    measure(options, report, ROWS, bench)
}

pub fn role(link: &mut Link) -> Result<()> {
    prepare_environment();
    let transport = Arc::new(NixlTransport::new(NixlConfig::default())?);
    serve(link, transport, |hello, arena| {
        let agent = Agent::new("bare", "peer")?;
        agent.register(arena.base(), arena.len())?;
        let peer = agent.connect(&target::metadata(&hello["target"])?)?;
        let descriptors = |base: u64| {
            let pages = (0..GEOMETRY.pages).map(move |i| (base + i * GEOMETRY.page, GEOMETRY.page));
            pages.chain((0..pair::ROWS).map(move |i| (base + GEOMETRY.rows_offset() + i * pair::ROW, pair::ROW)))
        };
        let lists = agent.prepare(&peer, descriptors(arena.base()), descriptors(number(hello, "base")?))?;
        let first_row = GEOMETRY.pages as i32;
        Ok(Box::new(move |page, row| {
            let room = [vec![0, first_row], vec![page as i32, first_row + row as i32]];
            agent.rooms(&lists, &[room], 1, Duration::ZERO).map(drop)
        }))
    })
}

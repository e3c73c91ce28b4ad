//! Trials: outcomes, lanes, back-pressure, memory held in flight, bounded resources.

use std::sync::{Arc, Weak};

use kv_core::ids::OpId;
use kv_core::memory::RegisteredRegion;
use kv_core::transport::{Outcome, SubmitError};

use super::bench::{Bench, Check, Source};
use super::{Harness, Run, Stop};

pub(super) const TRIALS: &[(&str, Run)] = &[
    ("outcome_exactly_once", exactly_once),
    ("busy_hands_back_then_accepts", busy_then_accept),
    ("regions_held_in_flight", regions_held),
    ("registration_ends_with_its_last_holder", registration_ends),
    ("two_lanes_keep_to_themselves", two_lanes),
    ("many_small_ops_bounded_resources", many_small_ops),
    ("poll_without_ops_is_silent", silent),
];

const K: usize = 1024;

fn exactly_once(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 64 * K, 64 * K)?;
    for i in 0..256u64 {
        let op = b.op(Bench::piece(&source, i * 128, block.addr + i * 256, 200), &[&source]);
        b.submit(op)?;
        if i % 3 == 0 {
            b.poll()?;
        }
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn busy_then_accept(h: &mut dyn Harness) -> Result<(), Stop> {
    const MOST: u64 = 20_000;
    let (mut b, source, block) = Bench::ready(h, 64 * K, 64 * K)?;
    b.check = Check::AtEnd;
    let mut busy = None;
    for i in 0..MOST {
        // All write the same bytes to the same place: order does not matter.
        let op = b.op(Bench::piece(&source, 0, block.addr, 4096), &[&source]);
        match b.try_submit(0, op)? {
            Ok(_) => {}
            Err(SubmitError::Busy(op)) => {
                busy = Some((i, op));
                break;
            }
            Err(SubmitError::Rejected(_, e)) => return Err(format!("op {i} was rejected: {e}").into()),
        }
    }
    let accepted = busy.as_ref().map_or(MOST, |(i, _)| *i);
    if let Some((_, op)) = busy {
        // Not posted: no outcome may ever come for it until it is accepted.
        b.until("the accepted ops", |b| Ok(b.seen(OpId(1)).is_some()))?;
        let id = op.id;
        b.watch()?;
        b.submit(op)?;
        b.outcome(id)?;
    }
    b.all_done()?;
    b.finish()?;
    match accepted {
        MOST => Err(Stop::Skip(format!("never Busy in {MOST} submissions without a poll"))),
        _ => Ok(()),
    }
}

/// Weak handles of a source, whose memory turns to poison once freed.
fn let_go(b: &mut Bench<'_>, source: Source) -> Weak<RegisteredRegion> {
    let weak = Arc::downgrade(&source.region);
    b.forget_sources();
    drop(source);
    weak
}

fn regions_held(h: &mut dyn Harness) -> Result<(), Stop> {
    for round in 0..8 {
        let (mut b, source, block) = Bench::ready(&mut *h, 256 * K, 256 * K)?;
        let len = 256 * K as u64;
        let bytes = source.memory.get(0, 256 * K);
        let mut ids = Vec::new();
        for i in 0..8u64 {
            let op = b.op(Bench::piece(&source, i * len / 8, block.addr + i * len / 8, len / 8), &[&source]);
            ids.push(b.submit(op)?);
        }
        // From here on the lane alone keeps the memory alive.
        let weak = let_go(&mut b, source);
        let mut missing: Option<Vec<OpId>> = None;
        b.until("the outcomes", |b| {
            if missing.is_none() && weak.upgrade().is_none() {
                // A lane may let go just before it reports; but then the bytes are in place by now.
                let now = b.target.read(block.id, 0, block.len)?;
                let open = ids.iter().enumerate().filter(|(_, id)| b.seen(**id).is_none());
                let part = |i: usize| i * block.len / 8..(i + 1) * block.len / 8;
                missing = Some(open.filter(|(i, _)| now[part(*i)] != bytes[part(*i)]).map(|(_, id)| *id).collect());
            }
            Ok(ids.iter().all(|id| b.seen(*id).is_some()))
        })?;
        let late = missing.iter().flatten().find(|id| b.seen(**id) == Some(&Outcome::Done));
        if let Some(id) = late {
            return Err(format!("round {round}: {id:?} was written after its source region had been let go").into());
        }
        b.all_done()?;
        b.until("the region to be let go", |_| Ok(weak.upgrade().is_none()))?;
        b.finish()?;
    }
    Ok(())
}

fn registration_ends(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut b = Bench::new(h)?;
    for _ in 0..100 {
        let source = b.source(K)?;
        let weak = let_go(&mut b, source);
        if weak.upgrade().is_some() {
            return Err("a region without holders stays registered".into());
        }
    }
    Ok(b.finish()?)
}

fn two_lanes(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 64 * K, 64 * K)?;
    let second = b.transport.lane().map_err(super::bench::text)?;
    b.lanes.push(second);
    for i in 0..100u64 {
        let mut op = Some(b.op(Bench::piece(&source, i * 256, block.addr + i * 512, 512), &[&source]));
        let lane = (i % 2) as usize;
        b.until("room on a lane", |b| match b.try_submit(lane, op.take().ok_or("no op")?)? {
            Ok(_) => Ok(true),
            Err(SubmitError::Busy(back)) => {
                op = Some(back);
                Ok(false)
            }
            Err(SubmitError::Rejected(_, e)) => Err(e.to_string()),
        })?;
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn many_small_ops(h: &mut dyn Harness) -> Result<(), Stop> {
    let (many, slack) = (h.many(), h.resource_slack());
    let (mut b, source, block) = Bench::ready(h, 256 * K, 256 * K)?;
    b.check = Check::AtEnd;
    let Some(before) = b.harness.resources() else {
        return Err(Stop::Skip("open files and threads cannot be counted here".into()));
    };
    let mut last = None;
    for i in 0..many {
        let at = (i % 4096) * 64;
        let op = b.op(Bench::piece(&source, at, block.addr + at, 48), &[&source]);
        last = Some(b.submit(op)?);
        if i % 16 == 0 {
            b.poll()?;
        }
        // A second write to a place waits for the first.
        if i % 4096 == 4095 {
            b.drain()?;
        }
    }
    if let Some(id) = last
        && b.outcome(id)? != Outcome::Done
    {
        return Err("the last op failed".into());
    }
    b.all_done()?;
    if let Some(after) = b.harness.resources()
        && (after.files > before.files + slack || after.threads > before.threads + slack)
    {
        return Err(format!("{many} ops left more behind: {before:?}, then {after:?}").into());
    }
    Ok(b.finish()?)
}

fn silent(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, _, _) = Bench::ready(h, K, K)?;
    b.watch()?;
    Ok(b.finish()?)
}

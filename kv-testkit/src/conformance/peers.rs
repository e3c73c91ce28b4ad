//! Trials: peers that go, come back, stop and die, and what may be called proven about their writes.

use kv_core::ids::OpId;
use kv_core::transport::{Outcome, SubmitError, WriteOp};

use super::bench::{Bench, Res, Source, text};
use super::{Block, Harness, Run, Stop};

pub(super) const TRIALS: &[(&str, Run)] = &[
    ("connect_twice_is_one_generation", connect_twice),
    ("later_registrations_are_covered", later_registrations),
    ("disconnected_peer_rejected", disconnected),
    ("reconnect_after_disconnect", reconnect),
    ("two_peers_at_once", two_peers),
    ("new_generation_tears_down_the_old", new_generation),
    ("killed_peer_proves_nothing_false", killed),
    ("cut_connection_no_late_writer", cut),
    ("paused_peer_proves_nothing", paused),
    ("unresolved_stays_until_proof", unresolved_stays),
];

const K: usize = 1024;

/// A connected bench with blocks of `pieces` pieces, and the bytes of a piece.
fn ready(h: &mut dyn Harness, pieces: usize) -> Res<(Bench<'_>, Source, Block, usize)> {
    let piece = h.piece();
    let (bench, source, block) = Bench::ready(h, pieces * piece, pieces * piece)?;
    Ok((bench, source, block, piece))
}

/// An op that writes piece `i`.
fn nth(b: &mut Bench<'_>, source: &Source, block: Block, i: u64) -> WriteOp {
    let piece = b.harness.piece() as u64;
    b.op(Bench::piece(source, i * piece, block.addr + i * piece, piece), &[source])
}

/// A trial about writes in flight has shown nothing when there were none.
fn unless_all_done(unfinished: usize) -> Result<(), Stop> {
    match unfinished {
        0 => Err(Stop::Skip("every write was done before its peer went: see Harness::piece".into())),
        _ => Ok(()),
    }
}

fn not_done(b: &Bench<'_>, ids: &[OpId]) -> usize {
    ids.iter().filter(|id| b.seen(**id) != Some(&Outcome::Done)).count()
}

/// `n` ops of one piece each, side by side in the block, from piece `first` on.
fn burst(b: &mut Bench<'_>, source: &Source, block: Block, first: u64, n: u64) -> Res<Vec<OpId>> {
    (first..first + n)
        .map(|i| {
            let op = nth(b, source, block, i);
            b.submit(op)
        })
        .collect()
}

/// As [`burst`] from piece 0, but stops at the first `Busy`: a stopped peer makes no room.
fn until_busy(b: &mut Bench<'_>, source: &Source, block: Block, n: u64) -> Res<Vec<OpId>> {
    let mut ids = Vec::new();
    for i in 0..n {
        let op = nth(b, source, block, i);
        match b.try_submit(0, op)? {
            Ok(id) => ids.push(id),
            Err(SubmitError::Busy(_)) => break,
            Err(SubmitError::Rejected(_, e)) => return Err(format!("a paused peer is rejected: {}", text(e))),
        }
    }
    Ok(ids)
}

fn connect_twice(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, K)?;
    let first = b.peer;
    b.connect()?;
    if b.peer != first {
        return Err(format!("one process is two generations: {first:?} and {:?}", b.peer).into());
    }
    let op = b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]);
    b.submit(op)?;
    b.all_done()?;
    if !b.lost.is_empty() {
        return Err("connecting again lost the peer".into());
    }
    Ok(b.finish()?)
}

fn later_registrations(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, first) = Bench::ready(h, K, K)?;
    let later = b.block(K)?;
    let late_source = b.source(K)?;
    b.connect()?;
    for (s, block) in [(&source, first), (&late_source, later)] {
        let op = b.op(Bench::piece(s, 0, block.addr, 64), &[s]);
        b.submit(op)?;
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn disconnected(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, K)?;
    let op = b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]);
    b.submit(op)?;
    b.all_done()?;
    b.transport.disconnect(b.peer);
    let op = b.op(Bench::piece(&source, 0, block.addr + 128, 64), &[&source]);
    b.must_not_be_done(op, "a peer that was let go")?;
    // Twice, and for nobody: no effect.
    b.transport.disconnect(b.peer);
    b.transport.disconnect(kv_core::PeerId(u64::MAX));
    Ok(b.finish()?)
}

fn reconnect(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block, _) = ready(h, 16)?;
    for round in 0..3 {
        burst(&mut b, &source, block, round * 4, 4)?;
        b.all_done()?;
        b.transport.disconnect(b.peer);
        b.connect()?;
    }
    burst(&mut b, &source, block, 12, 4)?;
    b.all_done()?;
    Ok(b.finish()?)
}

fn two_peers(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block, piece) = ready(h, 16)?;
    let mut other = b.harness.target();
    let there = other.alloc(16 * piece, true)?;
    let peer = b.transport.connect(&other.descriptor()?).map_err(text)?;
    if peer == b.peer {
        return Err("two processes are one peer".into());
    }
    let mut ids = Vec::new();
    for i in 0..8 {
        ids.extend(burst(&mut b, &source, block, i, 1)?);
        let op = WriteOp { peer, ..nth(&mut b, &source, there, i) };
        ids.push(b.submit(op)?);
    }
    b.all_done()?;
    let want = source.memory.get(0, 8 * piece);
    if other.read(there.id, 0, want.len())? != want {
        return Err("the second peer's bytes are not in place".into());
    }
    Ok(b.finish()?)
}

fn new_generation(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, old_block, piece) = ready(h, 64)?;
    let ids = burst(&mut b, &source, old_block, 0, 16)?;
    b.poll()?;
    let old = b.peer;
    // Which of them are Done by now was verified by the bench; the process they went to ends here.
    let next = b.harness.successor(&mut *b.target)?;
    b.stopped = true;
    let mut gone = b.new_target(next);
    let block = b.block(64 * piece)?;
    b.connect()?;
    if b.peer == old {
        return Err("the successor has its predecessor's PeerId".into());
    }
    // Neither the successor's memory nor what may be left of the predecessor's is reached through the old generation.
    for addr in [block.addr, old_block.addr] {
        let op = WriteOp { peer: old, ..b.op(Bench::piece(&source, 0, addr, 64), &[&source]) };
        b.must_not_be_done(op, "through the generation that was replaced")?;
    }
    b.until("the old generation's outcomes", |b| Ok(ids.iter().all(|id| b.seen(*id).is_some())))?;
    let new = burst(&mut b, &source, block, 32, 8)?;
    b.until("the new generation's outcomes", |b| Ok(new.iter().all(|id| b.seen(*id).is_some())))?;
    if let Some(id) = new.iter().find(|id| b.seen(**id) != Some(&Outcome::Done)) {
        return Err(format!("to the new generation, {id:?} ended {:?}", b.seen(*id)).into());
    }
    let _ = gone.kill();
    Ok(b.finish()?)
}

/// 32 writes, on every second round to a stopped peer (where one can be stopped): then they are in flight for certain.
/// Otherwise, a few polls more each round. Whether the peer is stopped now.
fn in_flight(b: &mut Bench<'_>, source: &Source, block: Block, round: u32) -> Res<(Vec<OpId>, bool)> {
    let held = round % 2 == 1 && b.pause();
    let ids = until_busy(b, source, block, 32)?;
    let polls = if held { 20 } else { round / 2 };
    (0..polls).try_for_each(|_| b.poll().map(drop))?;
    Ok((ids, held))
}

fn all_seen(b: &mut Bench<'_>, ids: &[OpId], what: &str) -> Res {
    b.until(what, |b| Ok(ids.iter().all(|id| b.seen(*id).is_some())))
}

fn kill(b: &mut Bench<'_>) -> Result<(), Stop> {
    b.target.kill()?;
    b.stopped = true;
    Ok(())
}

/// Cut the connections; a stopped peer goes on once that had time to be noticed, and finds what waits in its buffers.
fn cut_now(b: &mut Bench<'_>, held: bool) -> Result<(), Stop> {
    let done = b.harness.cut(b.peer, &mut *b.target);
    if held {
        b.watch()?;
        b.resume()?;
    }
    Ok(done?)
}

fn killed(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut unfinished = 0;
    for round in 0..4 {
        let (mut b, source, block, _) = ready(&mut *h, 64)?;
        let (ids, _) = in_flight(&mut b, &source, block, round)?;
        kill(&mut b)?;
        // Every op has its outcome; a Done one is verified by the bench wherever the memory can still be seen.
        all_seen(&mut b, &ids, "outcomes after the death")?;
        unfinished += not_done(&b, &ids);
        let op = b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]);
        b.must_not_be_done(op, "a dead peer")?;
        b.finish()?;
    }
    unless_all_done(unfinished)
}

fn cut(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut unfinished = 0;
    for round in 0..4 {
        let (mut b, source, block, _) = ready(&mut *h, 64)?;
        let (ids, held) = in_flight(&mut b, &source, block, round)?;
        cut_now(&mut b, held)?;
        // Whatever is called quiet is painted at once; `finish` sees whoever writes later.
        all_seen(&mut b, &ids, "outcomes after the cut")?;
        unfinished += not_done(&b, &ids);
        b.watch()?;
        // It is the same process, and can be reached again.
        b.connect()?;
        let again = burst(&mut b, &source, block, 40, 8)?;
        all_seen(&mut b, &again, "outcomes after connecting again")?;
        if let Some(id) = again.iter().find(|id| b.seen(**id) != Some(&Outcome::Done)) {
            return Err(format!("after connecting again, {id:?} ended {:?}", b.seen(*id)).into());
        }
        b.finish()?;
    }
    unless_all_done(unfinished)
}

fn paused(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block, piece) = ready(h, 64)?;
    b.target.pause()?;
    b.stopped = true;
    let ids = until_busy(&mut b, &source, block, 16);
    let watched = b.watch();
    let quiet = |b: &Bench<'_>, id: &OpId| b.quiet(*id) && b.seen(*id) != Some(&Outcome::Done);
    let quiet: Vec<OpId> = ids.iter().flatten().copied().filter(|id| quiet(&b, id)).collect();
    b.resume()?;
    let ids = ids?;
    watched?;
    // Called quiet while it could not answer: only true if nothing changes any more. Look now, and again at the end.
    let mut seen = Vec::new();
    for id in quiet {
        let at = ids.iter().position(|i| *i == id).unwrap_or(0) * piece;
        seen.push((id, at, b.target.read(block.id, at, piece)?));
    }
    all_seen(&mut b, &ids, "outcomes after the pause")?;
    b.watch()?;
    for (id, at, before) in seen {
        if b.target.read(block.id, at, piece)? != before {
            return Err(format!("{id:?} was called quiet while the peer was paused, and landed later").into());
        }
    }
    Ok(b.finish()?)
}

fn unresolved_stays(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut unresolved = 0;
    for round in 0..8 {
        let (mut b, source, block, _) = ready(&mut *h, 64)?;
        let (ids, held) = in_flight(&mut b, &source, block, round)?;
        if round < 4 {
            cut_now(&mut b, held)?
        } else {
            kill(&mut b)?
        }
        all_seen(&mut b, &ids, "outcomes")?;
        unresolved += ids.iter().filter(|id| b.left_open(**id)).count();
        if b.transport.capabilities().settles_unresolved {
            b.until("proof for every op", |b| Ok(ids.iter().all(|id| b.quiet(*id))))?;
        }
        // No second outcome and no second settlement: the bench watches for both.
        b.watch()?;
        b.finish()?;
    }
    match unresolved {
        0 => Err(Stop::Skip("every op ended quiet when its peer went".into())),
        _ => Ok(()),
    }
}

//! The bare control path: one 5-frame message from a thread that sends to a thread that sleeps in `ZmqInbox::wait`.
//!
//! `cargo run --release -p kv-transfer-core --example zmq_floor [MESSAGES] [GAP_US]` prints one-way p50 and p99 in
//! microseconds. *hot*: the sender spins between messages; *cold*: it sleeps. Nothing above libzmq is in the path but
//! this crate's socket handling, so it is the floor that the completion path is compared with.

use std::error::Error;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::Limits;
use kv_core::control::Multipart;
use kv_core::control::zmq::{PushRole, ZmqContext, ZmqInbox, ZmqOutbox};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let count: usize = args.next().map_or(Ok(3000), |a| a.parse())?;
    let gap = Duration::from_micros(args.next().map_or(Ok(300), |a| a.parse())?);
    for (name, spin) in [("hot", true), ("cold", false)] {
        let mut took = one_way(count, gap, spin)?;
        took.sort_unstable();
        let at = |q: f64| took[((took.len() - 1) as f64 * q) as usize] as f64 / 1000.0;
        println!("{name}: p50 {:.1} us, p99 {:.1} us, {} messages, gap {gap:?}", at(0.5), at(0.99), took.len());
    }
    let (messages, secs) = throughput(200_000)?;
    println!("back to back: {:.2} M messages/s", messages as f64 / secs / 1e6);
    Ok(())
}

fn status(stamp: u64) -> Multipart {
    let text = [&b"KV_STATUS"[..], b"123456789", b"4", b"0"];
    let mut frames: Multipart = text.map(Bytes::from_static).into_iter().collect();
    frames.push(Bytes::copy_from_slice(&stamp.to_le_bytes()));
    frames
}

fn stamp_of(message: &Multipart) -> Option<u64> {
    message.last()?.as_ref().try_into().ok().map(u64::from_le_bytes)
}

fn one_way(count: usize, gap: Duration, spin: bool) -> Result<Vec<u64>, Box<dyn Error>> {
    let limits = Limits::default();
    let start = Instant::now();
    let (mut inbox, to) = ZmqInbox::bind(&ZmqContext::new(&limits)?, "127.0.0.1", &limits)?;
    let mut outbox = ZmqOutbox::new(&ZmqContext::new(&limits)?, PushRole::ToDecode, &limits);
    let sender = std::thread::spawn(move || {
        for _ in 0..count {
            let until = Instant::now() + gap;
            if spin {
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            } else {
                std::thread::sleep(gap);
            }
            outbox.send(&to, status(start.elapsed().as_nanos() as u64))?;
        }
        Ok::<_, kv_core::control::ControlError>(outbox)
    });
    let mut took = Vec::with_capacity(count);
    let mut messages = Vec::new();
    while took.len() < count {
        inbox.wait(&[], Some(Duration::from_secs(10)))?;
        let now = start.elapsed().as_nanos() as u64;
        inbox.recv(64, &mut messages)?;
        took.extend(messages.drain(..).filter_map(|m| Some(now.saturating_sub(stamp_of(&m)?))));
    }
    sender.join().map_err(|_| "the sender panicked")??;
    // The first ones include the connection.
    Ok(took.split_off(count / 10))
}

fn throughput(count: usize) -> Result<(usize, f64), Box<dyn Error>> {
    let limits = Limits { max_send_queue: 1 << 20, ..Limits::default() };
    let (mut inbox, to) = ZmqInbox::bind(&ZmqContext::new(&limits)?, "127.0.0.1", &limits)?;
    let mut outbox = ZmqOutbox::new(&ZmqContext::new(&limits)?, PushRole::ToDecode, &limits);
    let start = Instant::now();
    let sender =
        std::thread::spawn(move || (0..count).try_for_each(|i| outbox.send(&to, status(i as u64))).map(|()| outbox));
    let (mut messages, mut got) = (Vec::new(), 0);
    while got < count {
        inbox.wait(&[], Some(Duration::from_secs(10)))?;
        got += inbox.recv(1024, &mut messages)?;
        messages.clear();
    }
    let secs = start.elapsed().as_secs_f64();
    sender.join().map_err(|_| "the sender panicked")??;
    Ok((got, secs))
}

//! B3: completion is pushed. Whoever waits is woken; polling is optional.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use kv_core::engine::{EventQueue, RoomEvent, RoomShared};

use super::support::*;

#[derive(Debug, Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn r_b3_a_waiter_is_woken_by_the_step_that_completes_the_room() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut context = Context::from_waker(&waker);
    let mut done = pin!(r.wait_for(|r| r.poll().is_terminal()));
    assert_eq!(done.as_mut().poll(&mut context), Poll::Pending);
    w.advance(SECOND);
    assert_eq!(count.0.load(Ordering::SeqCst), 0, "nothing happened");
    w.p[0].transport.complete(op);
    w.run();
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert_eq!(done.as_mut().poll(&mut context), Poll::Ready(()));
    one(&mut w, &s, &r);
}

#[test]
fn r_b3_a_blocked_thread_is_woken() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    let waiting = r.clone();
    let thread = std::thread::spawn(move || waiting.wait_for_timeout(secs(60), |r| r.poll().is_terminal()));
    w.p[0].transport.complete(op);
    w.run();
    assert!(thread.join().unwrap());
    one(&mut w, &s, &r);
}

#[test]
fn r_a1_whoever_waits_for_the_pages_is_woken_when_they_are_free() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut context = Context::from_waker(&waker);
    w.abort_d(0, &r);
    w.run();
    let (mut here, mut there) = (pin!(s.wait_for(RoomShared::releasable)), pin!(r.wait_for(RoomShared::releasable)));
    assert!(here.as_mut().poll(&mut context).is_pending() && there.as_mut().poll(&mut context).is_pending());
    w.p[0].transport.complete(op);
    w.run();
    assert!(here.as_mut().poll(&mut context).is_ready() && there.as_mut().poll(&mut context).is_ready());
    assert_eq!(count.0.load(Ordering::SeqCst), 2);
    one(&mut w, &s, &r);
}

#[test]
fn r_b3_changes_of_many_rooms_come_from_one_queue_each_room_once_with_its_newest_state() {
    let rung = Arc::new(AtomicUsize::new(0));
    let bell = rung.clone();
    let queue = Arc::new(EventQueue::new(Box::new(move || {
        bell.fetch_add(1, Ordering::SeqCst);
    })));
    let mut w = world();
    w.events = Some(queue.clone());
    let rooms: Vec<_> = (1..=3).map(|n| w.receiver(0, n)).collect();
    w.run();
    rooms.iter().for_each(|r| w.publish(0, r, &[0], 0));
    w.abort_d(0, &rooms[1]);
    w.run();
    let mut events = Vec::new();
    queue.drain(&mut events);
    let seen: Vec<_> = events.iter().map(|e: &RoomEvent| (e.room.get(), e.poll as u8, e.releasable)).collect();
    assert_eq!(seen, [(1, 2, false), (2, 0, true), (3, 2, false)]);
    assert_eq!(rung.load(Ordering::SeqCst), 1, "rung when it turns non-empty");
    events.clear();
    queue.drain(&mut events);
    assert_eq!(events, []);
    w.abort_d(0, &rooms[0]);
    w.run();
    queue.drain(&mut events);
    assert_eq!((events.len(), events[0].room.get(), rung.load(Ordering::SeqCst)), (1, 1, 2));
    rooms.iter().for_each(|r| w.clear_d(0, r));
    w.advance(secs(301));
    w.assert_nothing_held();
}

#[test]
fn cat_f74_ten_thousand_idle_rooms_ask_for_nothing_until_their_deadline() {
    let mut w = world();
    let senders: Vec<_> = (1..=10_000).map(|n| w.sender(0, n)).collect();
    w.run();
    // The shard wants to be called at the deadline, and not before: no poll, no tick.
    assert_eq!(w.next_due(), Some(w.clock.now() + w.spec.bootstrap_timeout));
    // One room completes among them: its waiter is woken in the step that hears of it, the others' are not.
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut context = Context::from_waker(&waker);
    let mut idle: Vec<_> = senders[1..100].iter().map(|s| Box::pin(s.wait_for(|s| s.poll().is_terminal()))).collect();
    assert!(idle.iter_mut().all(|f| f.as_mut().poll(&mut context).is_pending()));
    let r = w.receiver(0, 1);
    w.run();
    w.publish(0, &r, &[3], 0);
    w.send(0, &senders[0], &[0], 0, true);
    let mut done = pin!(senders[0].wait_for(|s| s.poll().is_terminal()));
    assert_eq!(done.as_mut().poll(&mut context), Poll::Pending);
    w.run();
    assert_eq!((r.poll(), done.as_mut().poll(&mut context)), (SUCCESS, Poll::Ready(())));
    // Woken for each change of its own room: WaitingForInput, Transferring, Success.
    assert!((1..=3).contains(&count.0.load(Ordering::SeqCst)), "{count:?}");
    drop(idle);
    w.clear_d(0, &r);
    senders.iter().for_each(|s| w.clear_p(0, s));
    w.run();
    w.assert_nothing_held();
}

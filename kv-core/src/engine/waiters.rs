//! Who waits for a room: tasks and blocked threads alike.
//!
//! Wakers are called after the list is unlocked. A waiter that was woken under the lock would run into it and sleep
//! once more, and that second sleep is a fifth of the way from the last write to decode's waiter.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics under these locks.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    wakers: Vec<(u64, Waker)>,
}

/// The waiters of one room.
///
/// Ordering: a waiter raises `some`, then looks at the room; the shard changes the room, then looks at `some`; each
/// with a `SeqCst` fence in between. So either the waiter sees the change, or the shard sees the waiter.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    some: AtomicBool,
    list: Mutex<List>,
}

impl Waiters {
    /// Wake everyone. Call it after the change is visible.
    pub fn wake_all(&self) {
        fence(Ordering::SeqCst);
        if !self.some.load(Ordering::Relaxed) {
            return;
        }
        let wakers = {
            let mut list = lock(&self.list);
            self.some.store(false, Ordering::Relaxed);
            std::mem::take(&mut list.wakers)
        };
        for (_, waker) in wakers {
            waker.wake();
        }
    }

    /// Wait until `done`.
    pub async fn wait(&self, done: impl Fn() -> bool) {
        let mut place = Place { waiters: self, id: None };
        std::future::poll_fn(|cx| place.poll(cx, &done)).await;
    }

    /// Block until `done` or the deadline; tells which.
    pub fn wait_blocking(&self, deadline: Option<Instant>, done: impl Fn() -> bool) -> bool {
        thread_local! {
            static PARKER: Arc<Parker> = Arc::default();
        }
        let parker = PARKER.with(Arc::clone);
        let waker = Waker::from(parker.clone());
        let mut wait = pin!(self.wait(&done));
        let mut cx = Context::from_waker(&waker);
        loop {
            if wait.as_mut().poll(&mut cx).is_ready() {
                return true;
            }
            if !parker.park(deadline) {
                return done();
            }
        }
    }
}

/// One waiter's place in the list; given up when dropped.
struct Place<'a> {
    waiters: &'a Waiters,
    id: Option<u64>,
}

impl Place<'_> {
    fn poll(&mut self, cx: &mut Context<'_>, done: impl Fn() -> bool) -> Poll<()> {
        if done() {
            return Poll::Ready(());
        }
        self.take(cx.waker());
        fence(Ordering::SeqCst);
        if done() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn take(&mut self, waker: &Waker) {
        let mut list = lock(&self.waiters.list);
        self.waiters.some.store(true, Ordering::Relaxed);
        // Not there any more after a wake.
        if let Some((_, known)) = list.wakers.iter_mut().find(|(id, _)| Some(*id) == self.id) {
            // The old one is dropped unlocked: it may be anybody's code.
            let old = (!known.will_wake(waker)).then(|| std::mem::replace(known, waker.clone()));
            drop(list);
            drop(old);
            return;
        }
        list.next += 1;
        self.id = Some(list.next);
        let id = list.next;
        list.wakers.push((id, waker.clone()));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id.filter(|_| self.waiters.some.load(Ordering::Relaxed)) else { return };
        let mut list = lock(&self.waiters.list);
        let at = list.wakers.iter().position(|(other, _)| *other == id);
        let waker = at.map(|at| list.wakers.swap_remove(at));
        drop(list);
        drop(waker);
    }
}

/// Puts a thread to sleep. Not `std::thread::park`, whose one token a thread may need for something else.
#[derive(Debug, Default)]
struct Parker {
    told: Mutex<bool>,
    bell: Condvar,
}

impl Parker {
    /// Sleep until woken; false when the deadline came first.
    fn park(&self, deadline: Option<Instant>) -> bool {
        let mut told = lock(&self.told);
        while !std::mem::take(&mut *told) {
            told = match deadline {
                None => self.bell.wait(told).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    self.bell.wait_timeout(told, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Unlocked before the bell, for the reason above.
        *lock(&self.told) = true;
        self.bell.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    #[test]
    fn r_b3_threads_and_tasks_are_woken_and_leave_nothing_behind() {
        let (waiters, word) = (Arc::new(Waiters::default()), Arc::new(AtomicU32::new(0)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (waiters, word) = (waiters.clone(), word.clone());
                std::thread::spawn(move || waiters.wait_blocking(None, || word.load(Ordering::Acquire) == 1000))
            })
            .collect();
        for n in 1..=1000 {
            word.store(n, Ordering::Release);
            waiters.wake_all();
        }
        for t in threads {
            assert!(t.join().unwrap());
        }
        assert!(lock(&waiters.list).wakers.is_empty());
    }

    #[test]
    fn a_deadline_ends_the_wait_and_gives_the_place_up() {
        let waiters = Waiters::default();
        assert!(!waiters.wait_blocking(Some(Instant::now() + Duration::from_millis(1)), || false));
        assert!(waiters.wait_blocking(Some(Instant::now()), || true));
        assert!(lock(&waiters.list).wakers.is_empty());
    }

    #[test]
    fn a_waker_may_come_back_to_the_list() {
        struct Again(Arc<Waiters>);
        impl Wake for Again {
            fn wake(self: Arc<Self>) {
                self.0.wake_all();
            }
        }
        let waiters = Arc::new(Waiters::default());
        let waker = Waker::from(Arc::new(Again(waiters.clone())));
        let mut wait = pin!(waiters.wait(|| false));
        for _ in 0..3 {
            assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            waiters.wake_all();
        }
    }
}

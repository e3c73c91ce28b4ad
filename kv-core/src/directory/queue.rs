//! Calls that wait for their turn: each registry has its own line, and the lines take turns.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::cache::{Call, CallId};

/// Calls under way at once.
const MOST: usize = 64;
/// Of them, to one registry: one that does not answer keeps no others from theirs.
const MOST_EACH: usize = 8;

/// Calls that were not made yet.
#[derive(Debug, Default)]
pub(super) struct CallQueue {
    lines: HashMap<Arc<str>, Line>,
    /// Lines of which the next call may be made, each once.
    turns: VecDeque<Arc<str>>,
    running: usize,
}

#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<(CallId, Call)>,
    running: usize,
    in_turn: bool,
}

impl CallQueue {
    pub fn push(&mut self, id: CallId, addr: Arc<str>, call: Call) {
        self.lines.entry(Arc::clone(&addr)).or_default().waiting.push_back((id, call));
        self.settle(addr);
    }

    /// The next call that may be made; it counts until it is [done](Self::done).
    pub fn pop(&mut self) -> Option<(CallId, Arc<str>, Call)> {
        while self.running < MOST {
            let addr = self.turns.pop_front()?;
            let Some(line) = self.lines.get_mut(&addr) else { continue };
            line.in_turn = false;
            let next = line.waiting.pop_front();
            line.running += usize::from(next.is_some());
            self.running += usize::from(next.is_some());
            self.settle(Arc::clone(&addr));
            if let Some((id, call)) = next {
                return Some((id, addr, call));
            }
        }
        None
    }

    /// A call to this registry has been answered.
    pub fn done(&mut self, addr: Arc<str>) {
        self.running = self.running.saturating_sub(1);
        if let Some(line) = self.lines.get_mut(&addr) {
            line.running = line.running.saturating_sub(1);
        }
        self.settle(addr);
    }

    /// Take a call back that was not made yet. One pass of its registry's line.
    pub fn cancel(&mut self, id: CallId, addr: Arc<str>) {
        if let Some(line) = self.lines.get_mut(&addr) {
            line.waiting.retain(|(waits, _)| *waits != id);
        }
        self.settle(addr);
    }

    /// In turn when it may go on; away when there is nothing of it.
    fn settle(&mut self, addr: Arc<str>) {
        let Some(line) = self.lines.get_mut(&addr) else { return };
        if line.waiting.is_empty() {
            if line.running == 0 {
                self.lines.remove(&addr);
            }
        } else if line.running < MOST_EACH && !std::mem::replace(&mut line.in_turn, true) {
            self.turns.push_back(addr);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Room;

    fn push(queue: &mut CallQueue, id: u64, addr: &str) {
        let room = Room::new(id + 1).unwrap();
        queue.push(CallId::of(id), addr.into(), Call::RegisterDpRank(room, 0));
    }

    fn pop(queue: &mut CallQueue) -> Option<(CallId, String)> {
        queue.pop().map(|(id, addr, _)| (id, addr.to_string()))
    }

    #[test]
    fn a_registry_that_does_not_answer_keeps_no_other_waiting() {
        let mut queue = CallQueue::default();
        (0..200).for_each(|n| push(&mut queue, n, "silent"));
        push(&mut queue, 900, "well");
        let made: Vec<_> = std::iter::from_fn(|| pop(&mut queue)).collect();
        assert_eq!(made.len(), MOST_EACH + 1);
        assert_eq!(made[1], (CallId::of(900), "well".into()), "lines take turns");
        queue.done("well".into());
        push(&mut queue, 901, "well");
        assert_eq!(pop(&mut queue), Some((CallId::of(901), "well".into())));
        assert_eq!(pop(&mut queue), None);
        queue.done("silent".into());
        assert_eq!(pop(&mut queue), Some((CallId::of(MOST_EACH as u64), "silent".into())), "in its order");
    }

    #[test]
    fn the_total_is_bounded_and_nothing_stays() {
        let mut queue = CallQueue::default();
        let addrs: Vec<String> = (0..100).map(|n| format!("r{n}")).collect();
        addrs.iter().for_each(|addr| push(&mut queue, 1, addr));
        let made: Vec<_> = std::iter::from_fn(|| pop(&mut queue)).collect();
        assert_eq!(made.len(), MOST);
        for (_, addr) in made {
            queue.done(addr.as_str().into());
            if let Some((_, next)) = pop(&mut queue) {
                queue.done(next.as_str().into());
            }
        }
        assert!(queue.lines.is_empty() && queue.turns.is_empty() && queue.running == 0, "{queue:?}");
    }

    #[test]
    fn a_call_that_was_taken_back_is_never_made() {
        let mut queue = CallQueue::default();
        push(&mut queue, 1, "r");
        push(&mut queue, 2, "r");
        queue.cancel(CallId::of(1), "r".into());
        assert_eq!(pop(&mut queue).map(|(id, _)| id), Some(CallId::of(2)));
        queue.done("r".into());
        push(&mut queue, 3, "r");
        queue.cancel(CallId::of(3), "r".into());
        assert_eq!(pop(&mut queue), None);
        assert!(queue.lines.is_empty(), "{queue:?}");
    }
}

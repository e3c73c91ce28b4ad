//! Alone in its process, because it counts the process's threads.

mod common;

use common::*;
use kv_core::transport::Outcome;
use kv_tcp::TcpConfig;

#[test]
fn threads_do_not_depend_on_the_number_of_peers() {
    let config = |c| TcpConfig { workers: 2, ..c };
    let d = Side::new(config(direct()), 1 << 20);
    let names = || -> Vec<String> {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|t| std::fs::read_to_string(t.unwrap().path().join("comm")).ok())
            .filter(|name| name.starts_with("kv-tcp"))
            .collect()
    };
    let count = |n: usize| {
        // Two workers and a keeper for each transport. A thread takes its name when it starts to run.
        let end = std::time::Instant::now() + PATIENCE;
        while names().len() != 3 * n {
            assert!(std::time::Instant::now() < end, "{:?}", names());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    count(1);
    let p = Side::new(config(tcp()), 1 << 20);
    let mut ear = Ear::new(&p);
    count(2);
    let targets: Vec<Side> = (0..10).map(|_| Side::new(config(tcp()), 1 << 20)).collect();
    count(12);
    for (n, t) in targets.iter().chain([&d]).enumerate() {
        // However often it is connected.
        let peer = p.connect(&t.descriptor(n as u16));
        assert_eq!(p.connect(&t.descriptor(n as u16)), peer);
        ear.submit(p.op(n as u64, peer, piece(&p, 0, t.base(), 1 << 20)));
        assert_eq!(ear.outcome(n as u64), Outcome::Done);
    }
    assert_eq!(p.transport.stats().peers, 11);
    count(12);
    drop((targets, d, ear, p));
    count(0);
}

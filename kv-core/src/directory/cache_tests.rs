use super::*;
use crate::bootstrap::types::PrefillRow;
use crate::directory::NixlEntries;
use crate::ids::PrefillRank;
use crate::topology::DecodeRank;
use crate::wire::ExtPeer;

const ADDR: &str = "p:8998";

fn at(millis: u64) -> Timestamp {
    Timestamp::ZERO + Duration::from_millis(millis)
}

fn config() -> DirectoryConfig {
    DirectoryConfig::decode(DecodeProfile::new(DecodeRank::default(), 16, "bfloat16"))
}

fn info(change: impl FnOnce(&mut PrefillRow)) -> ParallelInfo {
    let mut row = PrefillRow::from_json(
        br#"{"attn_tp_size":1,"attn_tp_rank":0,"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,"attn_dp_rank":0,
            "pp_size":1,"pp_rank":0,"system_dp_size":1,"system_dp_rank":0,"rank_ip":"10.0.0.1","rank_port":1,
            "page_size":16,"kv_cache_dtype":"bfloat16"}"#,
    )
    .unwrap();
    change(&mut row);
    ParallelInfo::of(&row)
}

/// Drives a core by hand; no thread, no network, no clock.
struct Bench {
    core: DirectoryCore,
    calls: Vec<(CallId, String, Call)>,
    events: Vec<DirectoryEvent>,
    cancelled: Vec<(CallId, String)>,
}

impl Bench {
    fn new(config: DirectoryConfig) -> Self {
        Self { core: DirectoryCore::new(config), calls: Vec::new(), events: Vec::new(), cancelled: Vec::new() }
    }

    fn take(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Event(event) => self.events.push(event),
                Effect::Cancel { id, addr } => self.cancelled.push((id, addr.to_string())),
                Effect::Call { id, addr, call } => self.calls.push((id, addr.to_string(), call)),
            }
        }
    }

    fn ask_at(&mut self, now: u64, addr: &str, room: u64, dp: Option<u32>) {
        let room = Room::new(room).unwrap();
        self.core.handle_request(
            at(now),
            DirectoryRequest::Peers { token: room.get(), room, bootstrap_addr: addr.into(), prefill_dp_rank: dp },
        );
        self.take();
    }

    fn ask(&mut self, now: u64, room: u64) {
        self.ask_at(now, ADDR, room, None);
    }

    fn tick(&mut self, now: u64) {
        self.core.handle_timeout(at(now));
        self.take();
    }

    /// Answers the oldest call that `answer` knows; says which it was.
    fn answer(&mut self, now: u64, answer: impl Fn(&Call) -> Option<Answer>) -> Option<Call> {
        let index = self.calls.iter().position(|(_, _, call)| answer(call).is_some())?;
        let (id, _, call) = self.calls.remove(index);
        self.core.handle_answer(at(now), id, answer(&call)?);
        self.take();
        Some(call)
    }

    fn answer_info(&mut self, now: u64, result: Result<ParallelInfo, RegistryError>) {
        let call = self.answer(now, |c| matches!(c, Call::ParallelInfo).then(|| Answer::ParallelInfo(result.clone())));
        assert_eq!(call, Some(Call::ParallelInfo));
    }

    fn answer_address(&mut self, now: u64, result: Result<RankAddress, RegistryError>) -> RankKey {
        let reply = |c: &Call| matches!(c, Call::RankAddress(_)).then(|| Answer::RankAddress(result.clone()));
        match self.answer(now, reply) {
            Some(Call::RankAddress(key)) => key,
            other => panic!("{other:?}"),
        }
    }

    fn answer_health(&mut self, now: u64, alive: bool) {
        let result = if alive { Ok(()) } else { Err(RegistryError::Unreachable("gone".into())) };
        let call = self.answer(now, |c| matches!(c, Call::Health).then(|| Answer::Health(result.clone())));
        assert_eq!(call, Some(Call::Health));
    }

    fn open(&mut self, now: u64, room: u64) -> Arc<PrefillPeers> {
        self.ask(now, room);
        self.answer_info(now, Ok(info(|_| {})));
        self.answer_address(now, Ok(address(1)));
        self.peers()
    }

    fn peers(&mut self) -> Arc<PrefillPeers> {
        match self.events.pop() {
            Some(DirectoryEvent::Peers { result: Ok(peers), .. }) => peers,
            other => panic!("{other:?}"),
        }
    }

    fn reason(&mut self) -> String {
        match self.events.pop() {
            Some(DirectoryEvent::Peers { result: Err(reason), .. }) => reason,
            other => panic!("{other:?}"),
        }
    }
}

fn address(port: u16) -> RankAddress {
    RankAddress { rank_ip: "10.0.0.1".into(), rank_port: port, ext: None }
}

#[test]
fn cat_f75_a_thousand_rooms_ask_once() {
    let mut b = Bench::new(config());
    (1..=1000).for_each(|room| b.ask(0, room));
    assert_eq!(b.calls.len(), 1, "one topology fetch");
    b.answer_info(1, Ok(info(|_| {})));
    assert_eq!(b.calls.len(), 1, "one address fetch");
    b.answer_address(2, Ok(address(7)));
    assert_eq!((b.events.len(), b.core.waiting()), (1000, 0));
    let mut tokens: Vec<_> =
        b.events.iter().map(|e| if let DirectoryEvent::Peers { token, .. } = e { *token } else { 0 }).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (1..=1000).collect::<Vec<_>>());
    b.ask(3, 2000);
    let peers = b.peers();
    assert_eq!((peers.records[0].endpoint.port(), &*peers.pool_key), (7, "p:8998_0_0_0"));
    assert_eq!(b.calls, []);
}

#[test]
fn connections_come_in_protocol_order_with_their_numbers() {
    let mut config = config();
    config.decode.as_mut().unwrap().rank.is_mla = true;
    config.decode.as_mut().unwrap().rank.all_cp = true;
    let mut b = Bench::new(config);
    b.ask(0, 1);
    b.answer_info(0, Ok(info(|r| (r.attn_tp_size, r.attn_cp_size, r.pp_size) = (2, 2, 2))));
    // Answered in another order than asked.
    b.calls.reverse();
    while !b.calls.is_empty() {
        b.answer_address(0, Ok(address(9)));
    }
    let peers = b.peers();
    let seen: Vec<_> = peers.records.iter().map(|r| (r.cp_rank, r.tp_rank, r.pp_rank, r.is_dummy, r.rank)).collect();
    let want = [
        (0, 0, 1, false, 2),
        (0, 0, 0, false, 0),
        (0, 1, 1, true, 6),
        (0, 1, 0, true, 4),
        (1, 0, 1, false, 3),
        (1, 0, 0, false, 1),
        (1, 1, 1, true, 7),
        (1, 1, 0, true, 5),
    ];
    assert_eq!(seen, want.map(|(cp, tp, pp, dummy, rank)| (cp, tp, pp, dummy, PrefillRank(rank))));
    assert_eq!((peers.required_dst_info_num, peers.required_prefill_response_num), (1, 4));
}

#[test]
fn a_server_that_is_not_ready_is_asked_once_a_second_fifteen_times() {
    let mut b = Bench::new(config());
    b.ask(0, 1);
    for attempt in 0..15 {
        let now = attempt * 1000;
        assert_eq!(b.calls.len(), 1, "attempt {attempt}");
        assert!(b.events.is_empty());
        b.answer_info(
            now,
            Err(RegistryError::NotReady("Prefill server not fully registered yet (1 workers registered).".into())),
        );
        b.tick(now + 999);
        assert_eq!(b.calls, [], "not before its time");
        b.tick(now + 1000);
    }
    let reason = b.reason();
    for part in
        ["bootstrap_addr: p:8998", "15 attempts in 14.0 s", "(1 workers registered)", "start the missing prefill ranks"]
    {
        assert!(reason.contains(part), "{reason}");
    }
    // F53: nobody waits, so nobody asks; and nothing stays behind.
    b.tick(16_000);
    assert_eq!((b.calls.len(), b.core.poll_timeout(), b.core.servers()), (0, None, 0));
    // F51: nothing is held against it.
    b.open(20_000, 2);
}

#[test]
fn ready_in_between_serves_everyone_who_waits() {
    let mut b = Bench::new(config());
    b.ask(0, 1);
    b.answer_info(10, Err(RegistryError::NotReady("no".into())));
    b.ask(20, 2);
    assert_eq!(b.core.poll_timeout(), Some(at(1000)));
    b.tick(1000);
    b.answer_info(1001, Ok(info(|_| {})));
    b.answer_address(1002, Ok(address(1)));
    assert_eq!(b.events.len(), 2);
}

#[test]
fn cat_f72_a_server_that_does_not_fit_fails_its_rooms_by_name_and_is_asked_again_later() {
    let mut b = Bench::new(config());
    b.ask(0, 1);
    b.answer_info(10, Ok(info(|r| r.page_size = 32)));
    let reason = b.reason();
    assert!(
        reason.contains("bootstrap_addr: p:8998") && reason.contains("page_size is 32 on prefill and 16 on decode"),
        "{reason}"
    );
    b.ask(500, 2);
    assert_eq!((b.reason(), b.calls.len()), (reason, 0), "remembered for a moment");
    // Not watched, as it is none of ours.
    assert_eq!(b.core.poll_timeout(), None);
    b.open(1010, 3);
}

#[test]
fn dp_rank_rules() {
    // Explicit, checked against the size.
    let mut b = Bench::new(config());
    let four = |r: &mut PrefillRow| r.attn_dp_size = 4;
    b.ask_at(0, ADDR, 1, Some(3));
    b.answer_info(0, Ok(info(four)));
    assert_eq!(b.answer_address(0, Ok(address(1))).dp, 3);
    assert_eq!(b.peers().pool_key, "p:8998_3_0_0");
    b.ask_at(0, ADDR, 2, Some(4));
    assert!(b.reason().contains("prefill_dp_rank 4 does not exist: dp_size is 4"));
    // By room.
    b.ask(0, 6);
    assert_eq!(b.answer_address(0, Ok(address(1))).dp, 2);
    assert_eq!(b.peers().pool_key, "p:8998_2_0_0");
    // The only group, whatever the method.
    let mut b = Bench::new(config());
    b.ask(0, 7);
    b.answer_info(0, Ok(info(|r| r.load_balance_method = "round_robin".into())));
    assert_eq!(b.answer_address(0, Ok(address(1))).dp, 0);
    // Forced to ask although rooms say it.
    let mut b = Bench::new(DirectoryConfig { force_query_dp_rank: true, ..config() });
    b.ask(0, 7);
    b.answer_info(0, Ok(info(four)));
    assert_eq!(b.calls[0].2, Call::QueryDpRanks(vec![Room::new(7).unwrap()]));
}

#[test]
fn cat_f60_a_room_that_asks_again_gets_the_same_rank() {
    for method in ["follow_bootstrap_room", "round_robin"] {
        let mut b = Bench::new(config());
        let mut keys = Vec::new();
        for now in [0, 200_000] {
            b.ask(now, 7);
            b.answer(now, |c| {
                let info = info(|r| (r.attn_dp_size, r.load_balance_method) = (4, method.into()));
                matches!(c, Call::ParallelInfo).then_some(Answer::ParallelInfo(Ok(info)))
            });
            b.answer(now, |c| match c {
                Call::QueryDpRanks(rooms) => Some(Answer::QueryDpRanks(Ok(vec![(rooms[0], 2)]))),
                _ => None,
            });
            b.answer(now, |c| matches!(c, Call::RankAddress(_)).then(|| Answer::RankAddress(Ok(address(1)))));
            keys.push(b.peers().pool_key.clone());
        }
        assert_eq!(keys[0], keys[1], "{method}");
    }
}

#[test]
fn rooms_that_prefill_claims_are_asked_for_together_until_they_appear() {
    let mut b = Bench::new(config());
    let claimed = |r: &mut PrefillRow| (r.attn_dp_size, r.load_balance_method) = (2, "round_robin".into());
    (1..=3).for_each(|room| b.ask(0, room));
    b.answer_info(0, Ok(info(claimed)));
    // The first room asked at once, the others come with the next question.
    let rooms = |b: &mut Bench, now, known: &[(u64, u32)]| {
        let known: Vec<_> = known.iter().map(|(r, d)| (Room::new(*r).unwrap(), *d)).collect();
        let call =
            b.answer(now, |c| matches!(c, Call::QueryDpRanks(_)).then(|| Answer::QueryDpRanks(Ok(known.clone()))));
        let Some(Call::QueryDpRanks(rooms)) = call else { panic!("{call:?}") };
        let mut rooms: Vec<_> = rooms.iter().map(|r| r.get()).collect();
        rooms.sort_unstable();
        rooms
    };
    assert_eq!(rooms(&mut b, 5, &[]), [1]);
    assert_eq!(b.core.poll_timeout(), Some(at(100)));
    b.tick(100);
    assert_eq!(rooms(&mut b, 105, &[(2, 1), (9, 0)]), [1, 2, 3]);
    assert_eq!(b.answer_address(106, Ok(address(1))).dp, 1);
    assert_eq!(b.peers().pool_key, "p:8998_1_0_0");
    // A claim that cannot be.
    b.tick(200);
    assert_eq!(rooms(&mut b, 205, &[(1, 2)]), [1, 3]);
    assert!(b.reason().contains("prefill_dp_rank 2 does not exist"));
    // A room that nobody claims is given up, saying so.
    b.tick(300_000);
    let reason = b.reason();
    assert!(
        reason.contains("No prefill rank claimed bootstrap_room 3 at bootstrap_addr: p:8998 within 300.0 s"),
        "{reason}"
    );
    assert_eq!(b.core.waiting(), 0);
}

#[test]
fn a_rank_without_address_fails_the_rooms_with_sglangs_text() {
    let mut b = Bench::new(config());
    b.ask(0, 1);
    b.answer_info(0, Ok(info(|_| {})));
    b.answer_address(0, Err(RegistryError::NotFound("Bootstrap info not found".into())));
    let reason = b.reason();
    assert!(
        reason.starts_with("Could not fetch bootstrap info for: prefill_dp_rank: 0 prefill_cp_rank: 0 target_tp_rank: 0 and target_pp_rank 0"),
        "{reason}"
    );
    // The sizes are fetched again before the next room: the server may be another one.
    b.ask(1000, 2);
    b.answer_info(1000, Ok(info(|r| r.attn_tp_size = 2)));
    assert_eq!(b.calls.len(), 2);
}

#[test]
fn cat_f51_one_failed_fetch_does_not_ban_the_server() {
    let mut b = Bench::new(config());
    b.ask(0, 1);
    b.answer_info(0, Ok(info(|_| {})));
    b.answer_address(0, Err(RegistryError::Unreachable("reset".into())));
    let reason = b.reason();
    b.ask(999, 2);
    assert_eq!((b.reason(), b.calls.len()), (reason, 0));
    b.ask(1000, 3);
    b.answer_address(1000, Ok(address(1)));
    b.peers();
}

#[test]
fn r_d7_a_lost_server_is_dropped_reported_and_registered_with_anew() {
    let mut b = Bench::new(config());
    let first = b.open(0, 1);
    assert_eq!(b.core.poll_timeout(), Some(at(5000)));
    for (now, alive) in [(5000, false), (10_000, true), (15_000, false)] {
        b.tick(now);
        b.answer_health(now, alive);
        assert_eq!(b.events, []);
    }
    b.tick(20_000);
    b.answer_health(20_000, false);
    assert_eq!(
        b.events,
        [DirectoryEvent::NodeLost {
            bootstrap_addr: ADDR.into(),
            reason: "Lost connection with prefill instance (bootstrap_addr: p:8998)".into(),
        }]
    );
    // F53: it is not probed any more.
    assert_eq!((b.core.poll_timeout(), b.core.servers()), (None, 0));
    b.events.clear();
    let again = b.open(30_000, 2);
    assert_eq!(again.pool_key, first.pool_key);
    assert_ne!(again.generation, first.generation);
}

/// Negative control for hazard 6 of 0.5.23: losing `p:899` there also drops everything of `p:8998`.
#[test]
fn losing_a_server_touches_no_other_with_the_same_beginning() {
    let mut b = Bench::new(config());
    let kept = b.open(0, 1);
    b.ask_at(0, "p:899", 2, None);
    b.answer_info(0, Ok(info(|_| {})));
    b.answer_address(0, Ok(address(2)));
    for now in [5000, 10_000] {
        b.tick(now);
        let probes: Vec<_> = std::mem::take(&mut b.calls);
        assert_eq!(probes.len(), 2);
        for (id, addr, _) in probes {
            let result = if addr == "p:899" { Err(RegistryError::Unreachable("gone".into())) } else { Ok(()) };
            b.core.handle_answer(at(now), id, Answer::Health(result));
        }
        b.take();
    }
    assert!(
        matches!(b.events.pop(), Some(DirectoryEvent::NodeLost { bootstrap_addr, .. }) if bootstrap_addr == "p:899")
    );
    b.ask(10_001, 3);
    assert_eq!(b.peers(), kept);
}

#[test]
fn answers_of_an_earlier_life_change_nothing() {
    let mut b = Bench::new(config());
    b.open(0, 1);
    // A room of another group is on its way when the server is lost.
    b.tick(5000);
    b.answer_health(5000, false);
    b.core.handle_request(at(6000), DirectoryRequest::Forget { pool_key: "p:8998_0_0_0".into() });
    b.ask(6000, 2);
    b.tick(10_000);
    b.answer_health(10_000, false);
    assert_eq!(b.events.len(), 2, "{:?}", b.events);
    assert!(
        matches!(&b.events[0], DirectoryEvent::Peers { token: 2, result: Err(r) } if r.starts_with("Lost connection"))
    );
    b.events.clear();
    b.ask(11_000, 3);
    let old = b.calls.remove(0);
    b.core.handle_answer(at(11_000), old.0, Answer::ParallelInfo(Ok(info(|r| r.attn_tp_size = 8))));
    b.take();
    assert_eq!(b.calls.len(), 1, "only the new life's question is under way");
    b.answer_info(11_001, Ok(info(|_| {})));
    b.answer_address(11_002, Ok(address(5)));
    assert_eq!(b.peers().records[0].endpoint.port(), 5);
}

#[test]
fn forgotten_peers_are_fetched_anew_with_the_sizes() {
    let mut b = Bench::new(config());
    let first = b.open(0, 1);
    b.core.handle_request(at(2000), DirectoryRequest::Forget { pool_key: first.pool_key.clone() });
    b.core.handle_request(at(2000), DirectoryRequest::Forget { pool_key: "p:8998_7_0_0".into() });
    b.ask(2000, 2);
    b.answer_info(2000, Ok(info(|_| {})));
    b.answer_address(2000, Ok(address(9)));
    let second = b.peers();
    assert_eq!(second.records[0].endpoint.port(), 9);
    assert_ne!(second.generation, first.generation);
    // The process behind the address changed its page size: caught, not written to.
    b.core.handle_request(at(4000), DirectoryRequest::Forget { pool_key: first.pool_key.clone() });
    b.ask(4000, 3);
    b.answer_info(4000, Ok(info(|r| r.page_size = 64)));
    assert!(b.reason().contains("page_size is 64 on prefill"));
}

#[test]
fn bounds_are_errors() {
    let mut config = config();
    (config.limits.max_rooms, config.limits.max_peers) = (2, 1);
    let mut b = Bench::new(config);
    b.ask(0, 1);
    b.ask_at(0, "q:1", 2, None);
    assert!(b.reason().contains("q:1: 1 prefill servers are known already"));
    b.ask(0, 3);
    b.ask(0, 4);
    assert!(b.reason().contains("2 rooms wait for an answer already"));
    b.ask_at(0, "no port", 5, None);
    assert!(b.reason().contains("\"no port\" is not host:port"));
    let mut prefill = Bench::new(DirectoryConfig::prefill());
    prefill.ask(0, 1);
    assert!(prefill.reason().contains("belongs to a prefill rank"));
}

/// The mapping fits, and the message would end the rank: it is not given out, unless the rank says that it is ours.
#[test]
fn r_h1_a_rank_that_our_registration_would_stop_is_not_given_out() {
    for ext in [None, Some(ExtPeer::new(crate::ids::ProcessGeneration(7)))] {
        let mut config = config();
        if let Some(profile) = &mut config.decode {
            profile.nixl = Some(NixlEntries { host_memory: true, layer_ids: false });
        }
        let mut b = Bench::new(config);
        b.ask(0, 1);
        b.answer_info(0, Ok(info(|r| r.pp_size = 2)));
        for port in [1, 2] {
            b.answer_address(0, Ok(RankAddress { ext, ..address(port) }));
        }
        if ext.is_some() {
            assert_eq!(b.peers().records.len(), 2);
            continue;
        }
        let reason = b.reason();
        for part in ["p:8998 does not fit", "KV in host memory and another PP size", "pp_size 2 on prefill"] {
            assert!(reason.contains(part), "{reason}");
        }
    }
}

#[test]
fn r_g1_a_claim_that_is_taken_back_is_not_asked_and_not_answered() {
    let mut b = Bench::new(DirectoryConfig::prefill());
    let (bootstrap_addr, room) = (ADDR.into(), Room::new(1).unwrap());
    b.core.handle_request(at(0), DirectoryRequest::RegisterDpRank { token: 7, bootstrap_addr, room, dp_rank: 1 });
    b.core.handle_request(at(0), DirectoryRequest::CancelDpRank { token: 8 });
    b.take();
    assert_eq!(b.cancelled, [], "another's");
    b.core.handle_request(at(0), DirectoryRequest::CancelDpRank { token: 7 });
    b.take();
    let (id, addr, _) = b.calls.pop().unwrap();
    assert_eq!(b.cancelled, [(id, addr)]);
    b.core.handle_answer(at(1), id, Answer::RegisterDpRank(Ok(())));
    b.core.handle_request(at(1), DirectoryRequest::CancelDpRank { token: 7 });
    b.take();
    assert_eq!((b.events.len(), b.cancelled.len()), (0, 1));
}

#[test]
fn r_g1_each_claim_of_a_room_is_asked_once_and_answered_once() {
    let mut config = DirectoryConfig::prefill();
    config.limits.max_rooms = 2;
    let mut b = Bench::new(config);
    for n in 1..=3 {
        let (bootstrap_addr, room) = (ADDR.into(), Room::new(n).unwrap());
        b.core.handle_request(
            at(0),
            DirectoryRequest::RegisterDpRank { token: 10 + n, bootstrap_addr, room, dp_rank: 1 },
        );
        b.take();
    }
    let answered = |token, result: Result<(), &str>| DirectoryEvent::DpRankRegistered {
        token,
        result: result.map_err(str::to_owned),
    };
    assert_eq!(b.events, [answered(13, Err("2 questions are under way already"))]);
    let answers = [Ok(()), Err(RegistryError::NotReady("soon".into()))];
    for answer in &answers {
        b.answer(1, |_| Some(Answer::RegisterDpRank(answer.clone())));
    }
    assert_eq!(b.calls, []);
    let error = answers[1].as_ref().unwrap_err().to_string();
    assert_eq!(b.events[1..], [answered(11, Ok(())), answered(12, Err(&error))]);
    // Nothing is kept for them.
    assert_eq!((b.core.servers(), b.core.poll_timeout()), (0, None));
}

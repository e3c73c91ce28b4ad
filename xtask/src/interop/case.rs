//! What a case is: data. The table of cases is in `cases`.

use super::options::Options;
use super::program::{Backend, Direction, Program};

/// Programs of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// A bootstrap server in a process of its own.
    Registry,
    Prefill,
    Decode,
    /// The prefill that takes the place of the first one.
    Prefill2,
    Decode2,
}

impl Who {
    pub fn name(self) -> &'static str {
        match self {
            Self::Registry => "registry",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Prefill2 => "prefill2",
            Self::Decode2 => "decode2",
        }
    }

    /// The word on the command line.
    pub fn role(self) -> &'static str {
        match self {
            Self::Registry => "bootstrap",
            Self::Prefill | Self::Prefill2 => "prefill",
            Self::Decode | Self::Decode2 => "decode",
        }
    }
}

/// Where the bootstrap server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registry {
    /// In prefill's first rank.
    InPrefill,
    /// In a process of the same program as prefill.
    Alone,
    /// In a process of the other program than prefill.
    Foreign,
}

/// What a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Ready,
    /// All rooms before the gate have ended.
    Gate,
    /// The room has ended, well or not.
    Room(u64),
    /// Every rank has counted its rooms.
    Summary,
}

/// What the runner does, one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    Start(Who),
    /// Wait for a line of the actor (or for its end).
    Seen(Who, Mark),
    Pause(f64),
    Kill(Who),
    Stop(Who),
    Continue(Who),
    /// A line on standard input: the rooms behind the gate start.
    Open(Who),
    /// End of standard input: a prefill that serves, and a registry, go.
    Close(Who),
    Ended(Who),
}

/// In which directions something holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Always,
    Prefill(Program),
    Decode(Program),
    In(Direction),
}

impl When {
    pub fn holds(self, direction: Direction) -> bool {
        match self {
            Self::Always => true,
            Self::Prefill(p) => direction.prefill == p,
            Self::Decode(p) => direction.decode == p,
            Self::In(d) => direction == d,
        }
    }
}

/// How a room fails: as the program that reports it says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fail {
    /// SGLang's words: one of them is in the reason.
    pub sglang: &'static [&'static str],
    /// Ours: one of them is in the reason, in small letters.
    pub ours: &'static [&'static str],
    /// All of them are.
    pub all: bool,
    /// Whether decode's pages were released by ACKs before the release timeout; `None`: not looked at.
    pub ack: Option<bool>,
    /// The pages were released so many ms after the ABORT, or after the failure where decode sent none before.
    pub ack_ms: Option<(f64, f64)>,
    pub acks: Option<u64>,
    /// The failure is known so many ms after the metadata at the latest (decode).
    pub latest_ms: Option<f64>,
}

impl Fail {
    /// Of any reason; but there must be one.
    pub const ANY: Self =
        Self { sglang: &[], ours: &[], all: false, ack: None, ack_ms: None, acks: None, latest_ms: None };

    pub const fn says(sglang: &'static [&'static str], ours: &'static [&'static str]) -> Self {
        Self { sglang, ours, ..Self::ANY }
    }

    pub const fn all_words(self) -> Self {
        Self { all: true, ..self }
    }

    pub const fn acked(self) -> Self {
        Self { ack: Some(true), ..self }
    }

    /// The pages were released by the timeout, so many ms after the failure.
    pub const fn unacked(self, least: f64, most: f64) -> Self {
        Self { ack: Some(false), ack_ms: Some((least, most)), ..self }
    }

    pub const fn ack_between(self, least: f64, most: f64) -> Self {
        Self { ack: Some(true), ack_ms: Some((least, most)), ..self }
    }

    pub const fn acks(self, n: u64) -> Self {
        Self { acks: Some(n), ..self }
    }

    pub const fn by_ms(self, latest: f64) -> Self {
        Self { latest_ms: Some(latest), ..self }
    }
}

/// How rooms end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome {
    /// Success; on decode every byte verified.
    Success,
    Failed(Fail),
    /// Success (verified), or the failure: it depends on which was faster.
    Either(Fail),
    /// Not looked at; but what is Success is verified.
    Any,
}

/// Rooms of one actor in some directions; the first rule that fits counts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    pub who: Who,
    /// As in `--rooms`; empty: all.
    pub rooms: &'static str,
    pub when: When,
    pub outcome: Outcome,
}

/// How an actor's process ends, where it is not as its rooms tell: 0 when all succeeded, else 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By SIGKILL.
    Killed,
    /// Exit status 4, after an error that has all these words.
    Refused(&'static [&'static str]),
    /// As its rooms tell, or otherwise: not looked at.
    Any,
}

/// What else is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Our control messages to SGLang have exactly its frames: the extension is sent to none that is not known to be ours.
    PlainFrames,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub name: &'static str,
    /// What it shows, in a line.
    pub shows: &'static str,
    both: String,
    prefill: String,
    decode: String,
    of: Vec<(Program, &'static str, &'static str)>,
    again: Vec<(Who, &'static str)>,
    pub registry: Registry,
    script: Vec<Step>,
    pub rules: Vec<Rule>,
    pub ends: Vec<(Who, When, End)>,
    pub checks: Vec<Check>,
    notes: Vec<(When, &'static str)>,
    not: Vec<(When, &'static str)>,
    over: Vec<(Backend, When, &'static str)>,
    /// Seconds until it has failed.
    pub within: u64,
}

/// The model of most cases: 4 layers of 16 pages of 16 KiB, 1 MiB a room.
const MODEL: &str = "--attn mla --layers 4 --pages 16 --page-size 64 --item-len 16384 --rooms 100:3 --timeout 20";

impl Case {
    pub fn new(name: &'static str, shows: &'static str) -> Self {
        Self {
            name,
            shows,
            both: MODEL.to_owned(),
            prefill: "--serve".to_owned(),
            decode: "--d-linger 0".to_owned(),
            of: Vec::new(),
            again: Vec::new(),
            registry: Registry::InPrefill,
            script: Vec::new(),
            rules: Vec::new(),
            ends: Vec::new(),
            checks: Vec::new(),
            notes: Vec::new(),
            not: Vec::new(),
            over: Vec::new(),
            within: 45,
        }
    }

    /// Options of both roles.
    pub fn both(mut self, line: &str) -> Self {
        self.both = format!("{} {line}", self.both);
        self
    }

    pub fn prefill(mut self, line: &str) -> Self {
        self.prefill = format!("{} {line}", self.prefill);
        self
    }

    pub fn decode(mut self, line: &str) -> Self {
        self.decode = format!("{} {line}", self.decode);
        self
    }

    /// Options of a role where one program plays it: the other has no need of them. No role: of both.
    pub fn of(mut self, program: Program, role: &'static str, line: &'static str) -> Self {
        self.of.push((program, role, line));
        self
    }

    /// Options of a second prefill or decode, over those of the first.
    pub fn again(mut self, who: Who, line: &'static str) -> Self {
        self.again.push((who, line));
        self
    }

    pub fn registry(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
    }

    pub fn script(mut self, steps: &[Step]) -> Self {
        self.script = steps.to_vec();
        self
    }

    pub fn rule(mut self, who: Who, rooms: &'static str, outcome: Outcome) -> Self {
        self.rules.push(Rule { who, rooms, when: When::Always, outcome });
        self
    }

    pub fn rule_when(mut self, when: When, who: Who, rooms: &'static str, outcome: Outcome) -> Self {
        self.rules.push(Rule { who, rooms, when, outcome });
        self
    }

    pub fn ends(mut self, who: Who, end: End) -> Self {
        self.ends.push((who, When::Always, end));
        self
    }

    pub fn ends_when(mut self, when: When, who: Who, end: End) -> Self {
        self.ends.push((who, when, end));
        self
    }

    pub fn check(mut self, check: Check) -> Self {
        self.checks.push(check);
        self
    }

    /// What the table says where SGLang itself does less than ours.
    pub fn note(mut self, when: When, note: &'static str) -> Self {
        self.notes.push((when, note));
        self
    }

    /// What the case is about is this backend's alone.
    pub fn only(mut self, backend: Backend, why: &'static str) -> Self {
        let others = [Backend::Nixl, Backend::Mooncake, Backend::Tcp].into_iter().filter(|b| *b != backend);
        self.over.extend(others.map(|b| (b, When::Always, why)));
        self
    }

    /// Directions in which there is nothing to run over this backend, and why.
    pub fn not_over(mut self, backend: Backend, when: When, why: &'static str) -> Self {
        self.over.push((backend, when, why));
        self
    }

    /// Directions in which there is nothing to run, and why.
    pub fn not(mut self, when: When, why: &'static str) -> Self {
        self.not.push((when, why));
        self
    }

    pub fn within(mut self, seconds: u64) -> Self {
        self.within = seconds;
        self
    }

    pub fn note_in(&self, direction: Direction) -> Option<&'static str> {
        self.notes.iter().find(|(w, _)| w.holds(direction)).map(|(_, n)| *n)
    }

    pub fn not_in(&self, direction: Direction, backend: Backend) -> Option<&'static str> {
        let over = self.over.iter().find(|(b, w, _)| *b == backend && w.holds(direction)).map(|(_, _, n)| *n);
        over.or_else(|| self.not.iter().find(|(w, _)| w.holds(direction)).map(|(_, n)| *n))
    }

    pub fn end_of(&self, who: Who, direction: Direction) -> Option<End> {
        self.ends.iter().find(|(w, when, _)| *w == who && when.holds(direction)).map(|(_, _, e)| *e)
    }

    /// What an actor's rooms are expected to do.
    pub fn outcome(&self, who: Who, room: u64, direction: Direction) -> Outcome {
        let fits = |r: &&Rule| {
            r.who == who
                && r.when.holds(direction)
                && (r.rooms.is_empty() || super::options::rooms(r.rooms).contains(&room))
        };
        self.rules.iter().find(fits).map_or(Outcome::Success, |r| r.outcome)
    }

    /// The case's options of an actor, with those of the program that plays it.
    pub fn options_in(&self, who: Who, direction: Direction) -> Options {
        let program = self.program(who, direction);
        let fits =
            |p: Program, role: &str| p == program && (role == who.role() || role.is_empty() && who != Who::Registry);
        let lines = self.of.iter().filter(|(p, role, _)| fits(*p, role)).map(|(_, _, line)| *line);
        lines.fold(self.options(who), Options::with)
    }

    /// Whether a program has a part in a direction.
    pub fn plays(&self, program: Program, direction: Direction) -> bool {
        let mut started =
            self.steps().into_iter().filter_map(|s| if let Step::Start(who) = s { Some(who) } else { None });
        started.any(|who| self.program(who, direction) == program)
    }

    /// The case's own options of an actor.
    pub fn options(&self, who: Who) -> Options {
        let own = match who.role() {
            "prefill" => &self.prefill,
            "decode" => &self.decode,
            _ => "",
        };
        let mut options = Options::parse(&self.both).with(own);
        if who == Who::Registry {
            return options.only(&["--bootstrap-host", "--host-ip"]);
        }
        for (_, line) in self.again.iter().filter(|(w, _)| *w == who) {
            options = options.with(line);
        }
        if who.role() == "prefill" && self.registry != Registry::InPrefill {
            options.set("--no-bootstrap", None);
        }
        if options.ranks() > 1 {
            options.set("--all-ranks", None);
        }
        options
    }

    /// Who plays an actor.
    pub fn program(&self, who: Who, direction: Direction) -> Program {
        match who.role() {
            "prefill" => direction.prefill,
            "decode" => direction.decode,
            _ if self.registry == Registry::Foreign => direction.prefill.other(),
            _ => direction.prefill,
        }
    }

    /// All steps, with those that every case has: the registry first, at the end everybody goes.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.registry != Registry::InPrefill {
            steps.extend([Step::Start(Who::Registry), Step::Seen(Who::Registry, Mark::Ready)]);
        }
        if self.script.is_empty() {
            // Times of decode are from its metadata on: prefill must be there to take it.
            steps.extend([Step::Start(Who::Prefill), Step::Seen(Who::Prefill, Mark::Ready), Step::Start(Who::Decode)]);
        }
        steps.extend(&self.script);
        let started: Vec<Who> =
            steps.iter().filter_map(|s| if let Step::Start(w) = s { Some(*w) } else { None }).collect();
        let of = |role: &'static str| started.iter().copied().filter(move |w| w.role() == role);
        steps.extend(of("decode").map(Step::Ended));
        for who in of("prefill") {
            // What decode said last is on its way.
            steps.extend([Step::Seen(who, Mark::Summary), Step::Close(who), Step::Ended(who)]);
        }
        for who in of("bootstrap") {
            steps.extend([Step::Close(who), Step::Ended(who)]);
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_together() {
        let case = Case::new("x", "").both("--rooms 5:2").prefill("--tp-size 2").again(Who::Decode2, "--rooms 7:1");
        assert!(case.options(Who::Prefill).has("--all-ranks") && case.options(Who::Prefill).has("--serve"));
        assert_eq!(case.options(Who::Decode).rooms(), [5, 6]);
        assert_eq!(case.options(Who::Decode2).rooms(), [7]);
        assert!(!case.options(Who::Prefill).has("--no-bootstrap"));
        assert!(case.registry(Registry::Foreign).options(Who::Prefill).has("--no-bootstrap"));
    }

    #[test]
    fn the_foreign_registry_is_of_the_other_program() {
        let case = Case::new("x", "").registry(Registry::Foreign);
        assert_eq!(case.program(Who::Registry, Direction::SGLANG_OURS), Program::Ours);
        assert_eq!(case.program(Who::Registry, Direction::OURS_SGLANG), Program::Sglang);
        assert_eq!(case.steps().first(), Some(&Step::Start(Who::Registry)));
        assert_eq!(case.steps().last(), Some(&Step::Ended(Who::Registry)));
    }

    #[test]
    fn the_first_rule_that_fits_counts() {
        let case = Case::new("x", "").rule_when(When::Prefill(Program::Ours), Who::Decode, "101", Outcome::Any).rule(
            Who::Decode,
            "101",
            Outcome::Failed(Fail::ANY),
        );
        assert_eq!(case.outcome(Who::Decode, 101, Direction::OURS_SGLANG), Outcome::Any);
        assert_eq!(case.outcome(Who::Decode, 101, Direction::SGLANG_OURS), Outcome::Failed(Fail::ANY));
        assert_eq!(case.outcome(Who::Decode, 102, Direction::SGLANG_OURS), Outcome::Success);
        assert_eq!(case.outcome(Who::Prefill, 101, Direction::SGLANG_OURS), Outcome::Success);
    }
}

//! What must hold in every state: one invariant a file. And what must be reached, so that the rest is not vacuous.

mod ack_is_proof;
mod deliver_once;
mod first_cause;
mod free_after_proof;
mod free_once;
mod give_back;
mod no_resurrection;
mod reached;
mod source;
mod success;
mod terminal;
mod told_when_settled;

use stateright::Property;

use crate::setup::Setup;

pub use reached::{LATER_LIFE, NO_PROOF, RETAINED, SUCCESS};

/// Every property of the model.
pub fn all() -> Vec<Property<Setup>> {
    let mut all = vec![
        Property::always(source::NAME, |m: &Setup, s| m.armed(|| source::holds(s))),
        Property::always(deliver_once::NAME, |m: &Setup, s| m.armed(|| deliver_once::holds(s))),
        Property::always(ack_is_proof::NAME, |m: &Setup, s| m.armed(|| ack_is_proof::holds(s))),
        Property::always(free_after_proof::NAME, |m: &Setup, s| m.armed(|| free_after_proof::holds(s))),
        Property::always(free_once::NAME, |m: &Setup, s| m.armed(|| free_once::holds(s))),
        Property::always(no_resurrection::NAME, |m: &Setup, s| m.armed(|| no_resurrection::holds(s))),
        Property::always(first_cause::NAME, |m: &Setup, s| m.armed(|| first_cause::holds(s))),
        Property::always(terminal::NAME, |m: &Setup, s| m.armed(|| terminal::holds(s))),
        Property::always(success::NAME, |m: &Setup, s| m.armed(|| success::holds(m, s))),
        Property::always(told_when_settled::NAME, |m: &Setup, s| m.armed(|| told_when_settled::holds(s))),
        Property::always(give_back::NAME, |m: &Setup, s| m.armed(|| give_back::holds(m, s))),
    ];
    all.extend(reached::properties());
    all
}

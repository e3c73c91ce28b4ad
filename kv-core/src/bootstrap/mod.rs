//! The bootstrap registry: who serves which prefill rank (protocol section 2).
